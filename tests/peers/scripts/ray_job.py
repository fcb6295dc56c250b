"""The example as a job: ``ray_job.py`` gives the folder to a cluster of this machine, as ``ray job submit`` does."""

import json
import sys
import time

import ray
from ray.job_submission import JobStatus, JobSubmissionClient

if __name__ == "__main__":
    cluster = ray.init(num_cpus=2, object_store_memory=2**27, include_dashboard=True, dashboard_port=0)
    try:
        client = JobSubmissionClient(f"http://{cluster.address_info['webui_url']}")
        job = client.submit_job(entrypoint=f"{sys.executable} rollouts_ray.py", runtime_env={"working_dir": "."})
        while not (status := client.get_job_status(job)).is_terminal():
            time.sleep(0.2)
        assert isinstance(status, JobStatus)
        print(json.dumps({"status": str(status.value), "logs": client.get_job_logs(job)}))
    finally:
        ray.shutdown()
