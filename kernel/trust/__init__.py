"""What the operator and the user have decided, in files: the policy, agreements, and what tools may have written.

`policy` reads and writes what the operator grants, `records` keeps what the user has agreed to, `judgement` looks at a
bundle by both. `written` finds files that tools may have written, and `private_copy` makes the copies that are run
where others can write. Requests of packages are accepted with `gdn grant`, and are no part of an agreement.
"""
