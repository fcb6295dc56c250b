"""Client processes that a benchmark drives. The peers' ones run in the peers' own virtual environments."""
