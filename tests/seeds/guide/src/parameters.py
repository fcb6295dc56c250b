# ruff: noqa
# fmt: off
from pydantic import BaseModel  # not in the guide
from aenv import register_tool

# Recommended type usage
@register_tool
def simple_types(
    name: str, # string
    count: int, # integer
    price: float, # float
    enabled: bool, # boolean
    tags: list[str] # string list
) -> str:
    return "OK"

# Using Pydantic models
class UserQuery(BaseModel):
    query: str
    max_results: int = 10
    include_details: bool = False

@register_tool
def search_users(params: UserQuery) -> str:
    return f"Searching: {params.query}"
