"""Classifiers of sequences: a recurrent one, and a bag of embedded words."""

from torch import Tensor, nn


class LSTMClassifier(nn.Module):
    """One layer of LSTM, its last output classified."""

    def __init__(self, inputs: int = 64, width: int = 128) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(inputs, width, batch_first=True), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.lstm(x)
        return self.head(hidden[:, -1])


class EmbeddingClassifier(nn.Module):
    """The mean of embedded words, classified: almost every parameter is a row that few samples touch."""

    def __init__(self, vocabulary: int = 50_000, width: int = 64) -> None:
        super().__init__()
        self.words, self.hidden, self.head = (
            nn.Embedding(vocabulary, width),
            nn.Linear(width, width),
            nn.Linear(width, 10),
        )

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.hidden(self.words(ids).mean(1)).relu())
