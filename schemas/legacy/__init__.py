"""The older message form (`delegate`, `delegate_result`), for programs that were written for it.

No process of the kernel imports this package. A holder of a link may put it around that link (PROTOCOL.md, "The older
message form").
"""
