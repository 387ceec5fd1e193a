from goondan.toolhost.base.goondan_base.web_address import *
