"""Rollout: from prompts to finished batches.

Pure: `admission` (when), `router` (where), `prompts` (what), `statistics`. On the event loop: `scheduler` keeps groups
under way, `dispatch` sends requests, `judge` asks the reward, `evaluation`, `weights` (holds), `service` (HTTP).
"""
