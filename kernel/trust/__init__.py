"""Trust by folder: what a bundle can do beyond its jails, and whether this user has agreed to that.

`powers` says what can be asked for, and whether one list goes beyond another. `gather` reads the list from a bundle,
`judge` decides. These three are pure. `judgement` looks at folders too, `records` keeps what was agreed to, and
`private_copy` makes the copies that are run where others can write.

Requests of packages are not part of it: `gdn grant` accepts those.
"""
