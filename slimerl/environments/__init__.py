"""What a policy acts on: tools that it calls, environments that answer its actions.

Flows in: texts of the policy, from the rollout's event loop. Flows out: texts that it observes, and rewards.
Invariants: all of it runs in worker processes that can be killed and replaced (`slimerl.rewards.pool`); what the policy
did wrong is text that it is told, what the machinery did wrong is a `Failed` under its name; an episode is a function
of its task and the actions so far, so that any worker can take it up by replaying them.
"""
