# ruff: noqa
# fmt: off
from aenv import register_health

@register_health
def system_health_check() -> dict:
    """
    System health check function.
    Check CPU, memory, disk usage, and system running status.
    Returns:
        Dictionary containing various health indicators
    """
    import psutil
    return {
        "status": "healthy",
        "cpu_percent": psutil.cpu_percent(),
        "memory_percent": psutil.virtual_memory().percent,
        "disk_usage": psutil.disk_usage("/").percent,
        "uptime": "Running normally"
    }
