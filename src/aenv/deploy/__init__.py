"""The platform on Kubernetes: its chart rendered without Helm, and applied to a cluster."""
