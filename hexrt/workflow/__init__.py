"""What a user writes and what becomes of it.

`model` is the wire form; `build` (Python), `load` and `syntax` (YAML and JSON) make one; `check`, with `ports`, `references`, `edges` and `order`,
turns it into the `TaskGraph` of `graph`; `fields` says where a fault lies; `schema` describes the files.
"""
