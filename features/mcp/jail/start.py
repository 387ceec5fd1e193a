"""The file that the interpreter of the SDK template is started with (-I -S): it finds our packages and the installed
ones.

`python -I -S -B start.py [USER] FD FILTER_FD WORKER_FILTER_FD AUTHORITIES_FD` serves the tool host at the other end of
the socket FD until it is closed. FILTER_FD holds the system call filter of the template, WORKER_FILTER_FD what each
worker puts on top of it, AUTHORITIES_FD the certificates to trust. Root becomes USER.
"""

import os
import site
import sys

ROOT = __file__.rpartition("/goondan/features/")[0]

site.main()  # the environment's packages: the SDK is one of them
# Only this one: the folder itself may be a workdir of tools, and must not be asked for modules of other names.
sys.path.insert(0, ROOT)
import goondan  # noqa: E402, F401

sys.path.remove(ROOT)

*user, channel, filter_, worker_filter, authorities = map(int, sys.argv[1:])
os.environ["SSL_CERT_FILE"] = f"/dev/fd/{authorities}"  # it is read before the walls are there

from goondan.features.mcp.jail.template import main  # noqa: E402 # imports the SDK

sys.exit(main(channel, filter_, worker_filter, user=user[0] if user else None))
