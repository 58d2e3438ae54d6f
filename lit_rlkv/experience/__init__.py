"""One iteration of RL data, in the order it flows: sample, score, reward, advantages, minibatches."""
