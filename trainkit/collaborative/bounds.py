"""How much of what others write a node keeps and reads: so many records under one key, for so long.

hivemind's nodes keep every record that is valid, and read as many as somebody sends; of many they refuse all as soon as
one of them is not valid.
"""

from __future__ import annotations

import time
from typing import Any

from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue

from trainkit.collaborative.messages import MOST_PEERS

# A round, and three more in which nobody has heard of a peer, are shorter.
_LONGEST_NEWS = 3600.0


def bound_records(*short_lived: str) -> None:
    """Call it in the process of a node before the node starts; it has no other nodes.

    Args:
        short_lived: keys whose records must not outlast an hour: whoever floods them gives up their place by then.
    """
    news = {DHTID.generate(source=key) for key in short_lived}
    validate, store = DHTProtocol._validate_record, DHTLocalStorage.store_subkey

    def store_bounded(self: Any, key: Any, subkey: Any, value: Any, expiration_time: float) -> bool:
        if key in news and expiration_time > time.time() + _LONGEST_NEWS:
            return False
        known = self.get(key)
        there = known.value if known is not None and isinstance(known.value, DictionaryDHTValue) else {}
        # Who is there may stay: else a flood of newcomers would wash away everybody.
        if len(there) >= MOST_PEERS and subkey not in there:
            return False
        # hivemind would keep the newer record and drop it when the older one expires: who sends again what somebody has
        # said before could make that peer, or the run, vanish.
        before = there.get(subkey)
        if before is not None and before.expiration_time >= expiration_time:
            return False
        return bool(store(self, key, subkey, value, expiration_time))

    def validate_bounded(self: Any, key_bytes: bytes, dictionary: Any) -> bool:
        """Leave out what is not valid, and what is too much."""
        if not isinstance(dictionary, DictionaryDHTValue):
            return False
        with dictionary.freeze():
            for place, (subkey, (value, expires)) in enumerate(list(dictionary.items())):
                if place >= MOST_PEERS or not validate(self, key_bytes, self.serializer.dumps(subkey), value, expires):
                    del dictionary[subkey]
        return True

    DHTLocalStorage.store_subkey = store_bounded
    DHTProtocol._validate_dictionary = validate_bounded
