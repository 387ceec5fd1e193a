"""The dealings of every process with the operating system: its start, its user, its folders, its memory.

All of it reads or changes the machine, or says which of its users are ours. No module of the contract imports this
package; the link does, and so do the processes (docs/design/wire.md section 1).
"""
