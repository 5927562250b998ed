"""The planner: a job of any size run dry on one machine; its memory, its traffic and what they cost."""
