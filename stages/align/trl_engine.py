"""TRL."""
def train_sft(*a): raise NotImplementedError
def train_reward(*a): raise NotImplementedError
def train_dpo(*a): raise NotImplementedError
