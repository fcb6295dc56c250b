"""``python -m tests.cluster``: make what tests of Kubernetes need."""

from tests.cluster import material

material.make()
