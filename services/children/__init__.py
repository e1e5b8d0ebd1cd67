"""Child processes of a command: started, sent typed messages, waited for, and ended, with what they wrote to stderr."""
