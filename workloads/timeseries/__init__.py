"""LSTM, Transformer and MLP on prices at several time frames."""
