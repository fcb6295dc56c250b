# ruff: noqa
# fmt: off
import aenv
print(aenv.__version__)
