"""The machine as tests see it: locale, time zone, proxies, umask, groups and limits are set here.

`settle` is called once, before anything else is imported. What a test wants otherwise it sets itself. Accounts and
ranges cannot be set for a whole run: a test that is about them has files of its own (containment/test_accounts.py).
"""

from __future__ import annotations

import os
import resource
import time
from contextlib import suppress
from typing import Final

#: The environment as it was found: for what installs packages, which may be reached by a proxy only.
FOUND: Final = dict(os.environ)
#: Variables of whoever starts the tests that change what programs do or print.
_THEIRS: Final = (
    "TZ",
    "LANG",
    "LANGUAGE",
    "LOCPATH",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
    "FTP_PROXY",
    "NO_PROXY",
)
#: Soft limits (None: as high as the hard one), those of a login on most systems.
_LIMITS: Final = {
    resource.RLIMIT_NOFILE: 1024,
    resource.RLIMIT_STACK: 8 << 20,
    resource.RLIMIT_CORE: 0,
    **dict.fromkeys(
        (resource.RLIMIT_FSIZE, resource.RLIMIT_AS, resource.RLIMIT_DATA, resource.RLIMIT_CPU, resource.RLIMIT_NPROC)
    ),
}


def settle() -> None:
    """Set all of it, for this process and for what it starts. A hard limit that is lower stays."""
    for name in [name for name in os.environ if name.upper() in _THEIRS or name.startswith("LC_")]:
        del os.environ[name]
    os.environ |= {"LANG": "C.UTF-8", "TZ": "UTC"}
    time.tzset()
    os.umask(0o022)
    if os.geteuid() == 0:
        with suppress(OSError):  # a namespace that does not let us has no others
            os.setgroups([])
    for which, soft in _LIMITS.items():
        hard = resource.getrlimit(which)[1]
        above = soft is None or (hard != resource.RLIM_INFINITY and soft > hard)
        resource.setrlimit(which, (hard if above or soft is None else soft, hard))
