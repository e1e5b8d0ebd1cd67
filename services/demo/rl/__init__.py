"""The demo of a training whose reward a rule computes: ranks of FSDP2, an engine, a curve that goes up."""
