"""Services: replicas of an environment behind one URL, kept alive until they are deleted."""
