"""Model servers, as far as commands look at them: one question to a server, and servers on this machine.

`listing.py` decides, `finding.py` looks, `choice.py` keeps what a person has chosen, `offering.py` asks the person. How
models are asked for answers is the agents' business (agentproc/providers/).
"""
