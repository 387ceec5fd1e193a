"""The bundle: from files on disk to validated resources, with a position for every problem.

`positions` reads YAML, `shape` fits it to the structs of goondan.schemas.bundle.resources, `check` and `tools` have the
rules, `handlers` asks a jail for the exports of a tool's module, and `loader` puts the steps in order. Nothing here
starts a process of the kernel.

Source: docs/design/bundle.md section 1; requirements VALIDATE-01 to VALIDATE-04.
"""
