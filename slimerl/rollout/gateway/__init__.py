"""The gateway: agent programs from outside talk to the policy as to any OpenAI or SGLang server, and are trained.

Pure: `conversation` (what a request goes on with), `template` (what is new as text), `sessions` (trees of token-exact
turns), `requests`, `replies`, `tool_calls`, `answers`, `branches` (what is trained). On the event loop: `sampler` (one
turn through the dispatcher), `desk` (a request's place in its session), `external` (tasks), `streaming` (to those who
read along), `front` (HTTP), `hot_path` (/generate without a web framework).
"""
