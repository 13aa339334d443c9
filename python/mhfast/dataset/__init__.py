"""What a data set is: `Dataset`, its groups of tokens and samples, and the streams of seeds."""
