"""The words of the bundled tools for errors of the operating system.

Source: recorded parity (`to-directory`, `parent-is-file`, `existing-not-recursive`). Its words are those of libuv.
Where libuv uses the system's own words in small letters, there is no entry here.
"""

from __future__ import annotations

import errno
import posix

_WORDS = {
    errno.EEXIST: "file already exists",
    errno.EISDIR: "illegal operation on a directory",
    errno.ELOOP: "too many symbolic links encountered",
    errno.ENAMETOOLONG: "name too long",
    errno.ETXTBSY: "text file is busy",
}


def reason_of(number: int) -> str:
    """The words for an error number."""
    return _WORDS.get(number) or posix.strerror(number).lower()


def name_of(number: int) -> str:
    """The name of an error number: `ENOENT` for 2."""
    return errno.errorcode.get(number, f"errno {number}")
