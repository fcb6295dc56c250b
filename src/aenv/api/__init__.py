"""The API service: instances, from a request to their end, and the way to them."""
