"""The worker half: binds this process in place, on the standard library alone.

Where a cgroup holds a rank, nothing here is needed; where there is none to ask, these modules bind
the threads and the memory policy of the process itself and say what really holds. Importing them
does nothing and costs little, since an engine imports them before everything else: what is heavy
(ctypes above all) is imported where it is used, and dataclasses and typing not at all.
"""
