# ruff: noqa
# fmt: off
from aenv import Environment  # not in the guide

made = []  # ours: what each snippet made

env = Environment(
    env_name="data-analysis-env", # Environment name
    datasource="/data/workspace", # Data source path
    ttl="2h", # Lifecycle 2 hours
    environment_variables={
        "PYTHONPATH": "/app",
        "MODEL_PATH": "/models/bert",
        "API_KEY": "sk-xxx"
    },
    arguments=["--verbose", "--gpu"], # Startup arguments
    aenv_url="http://localhost:8080", # AEnvironment service address
    timeout=60.0, # Timeout (seconds)
    max_retries=5, # Max retry count
    api_key="your-api-key" # API key
)
made.append(env)

env = Environment(
    env_name="swe-env",
    datasource="/path/to/dataset"
)
made.append(env)

env = Environment(
    env_name="my-env",
    environment_variables={
        "API_KEY": "secret-key",
        "DEBUG": "true",
        "LOG_LEVEL": "info"
    }
)
made.append(env)

env = Environment(
    env_name="my-env",
    arguments=["--config", "/app/config.yaml", "--verbose"]
)
made.append(env)

# 30 minutes (default)
env = Environment("my-env", ttl="30m")
made.append(env)
# 2 hours
env = Environment("my-env", ttl="2h")
made.append(env)
# 1 day
env = Environment("my-env", ttl="24h")
made.append(env)
