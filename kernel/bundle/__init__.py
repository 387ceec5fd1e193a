"""The bundle: from files on disk to validated resources, with a position for everything that is wrong.

`positions` reads YAML, `shape` fits it to the structs of schemas.resources, `check` and `tools` hold the rules,
`handlers` asks a jail what a tool's module exports, `bundle` puts the steps in order. Nothing here starts anything.

Source: docs/design/bundle.md section 1; requirements VALIDATE-01 to VALIDATE-04.
"""
