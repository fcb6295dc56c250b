"""A local engine, served over HTTP for API services elsewhere."""
