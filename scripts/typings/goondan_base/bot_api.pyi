from goondan.toolhost.base.goondan_base.bot_api import *
