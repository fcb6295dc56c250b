"""``python -m tests.daemons``: make what tests of containers need."""

from tests.daemons import rootfs

rootfs.make()
