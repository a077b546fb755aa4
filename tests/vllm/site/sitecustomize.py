"""In every process of these tests' engines: who waits for another process sleeps a little, and does not yield.

vLLM's processes of a TP engine spin on ``sched_yield`` while they wait for one another, all the time while a request is
held. With two such engines on two cores, beside stock's spinning agents, a handshake was once not through after a
minute, probably for want of a turn. What is tested here is not how vLLM waits.
"""

import os
import time

os.sched_yield = lambda: time.sleep(1e-4)
