# ruff: noqa
# fmt: off
from aenv import Environment  # not in the document

made = []  # ours: what each snippet made

env = Environment(
    env_name="swe-env",
    datasource=""
)
made.append(env)

env = Environment(
    env_name="swe-env",
    datasource="swebench/sweb.eval.x86_64.{instance_id}_1776_p5.js-5771:latest"
)
# Full image name: swebench/sweb.eval.x86_64.{instance_id}_1776_p5.js-5771:latest
made.append(env)

# Configure image prefix
imagePrefix = "custom_registry/swebench/common_name:"

# Only need to pass instance ID when creating environment
env = Environment(
    env_name="swe-env",
    datasource="{instance_id}"
)
# Full image name: custom_registry/swebench/common_name:{instance_id}
made.append(env)
