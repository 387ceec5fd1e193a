"""The file that the jail's interpreter is started with: it puts up the last walls and runs the worker.

A script is compiled at every start while a module is cached, so everything else is elsewhere.
"""

import sys

sys.path.insert(0, __file__.rpartition("/goondan_tool/")[0])

from goondan_tool.confine import become, confine  # type: ignore[import-not-found] # this package's name in a jail

plan = confine()

if plan["program"] is not None:
    become(plan["program"])
elif plan["calls"] is None:
    from goondan_tool.worker import main  # type: ignore[import-not-found]

    main()
else:
    from goondan_tool.forkserver import serve  # type: ignore[import-not-found]

    serve(plan)
