"""The equations of RL Tango, advantages, and variants of other papers. Pure Python and torch."""
