"""The text that the page opens with: longer than a window, and asking at its end for what stood at its beginning."""

from __future__ import annotations

# ruff: noqa: E501

LONG = """The harbour of Lindal was closed for the winter, and the keeper of the gate had a new watchword. "Cobalt lantern," said Mayor Osei, "and let nobody in who does not say cobalt lantern." The keeper wrote it into his book and locked the book away.

Then the council met to decide what the town could spend. The Mayor asked for a new bridge, because the old bridge had carried the mail, the grain and the school children for ninety years. The treasurer answered that the state had promised half of the money, and that the state had not yet paid. "We were told in March," she said, "that the money would be here in June. It is now December." Two farmers from the hills spoke of their sheep, which could not cross the river when the water was high. A teacher counted the days on which her room had been empty. Nobody spoke of the gate.

In the afternoon it began to snow. The fishermen carried their nets into the long sheds behind the church, and the women of the bakery brought bread for everyone who had come down from the hills. Old Marten told again how the first ships had come, with timber and with salt, and how the sailors had built the sheds in a single summer. The children asked whether there had been whales, and he said that there had been whales, and a bear on the ice, and a bishop who was afraid of both. They laughed, and the lamps were lit, and the windows of the hall turned white.

In the end the council voted for the bridge, eleven to two, and wrote to the capital that the harbour would open in spring. The letter went out with the evening mail. It said that the work of ninety years was not forgotten, that the people of the town would pay their half, and that they asked for nothing which had not been promised to them. The Mayor signed it, and the treasurer sealed it, and then they walked home through the snow.

It was long after midnight when somebody knocked at the gate of the harbour. "Who is there?" asked the keeper. "A friend," said the voice in the dark. "Then you know the watchword," said the keeper, and the voice answered: "Cobalt"""
SHORT = """The harbour of Lindal was closed for the winter, and the council met to decide what the town could spend. Mayor Osei asked for a new bridge, because the old bridge had carried the mail, the grain and the school children for ninety years. The treasurer answered that the state had promised half of the money, and that the state had not yet paid. "We were told in March," she said, "that the money would be here in June. It is now December." Then Mayor Osei read the letter from the President again. The letter said that the United States would stand by the people of Lindal, that the work of the year 1908 was not forgotten, and that the Congress would be asked to act. In the end the council voted for the bridge, eleven to two, and wrote to the treasurer of the United States that the harbour of Lindal would open in spring."""
