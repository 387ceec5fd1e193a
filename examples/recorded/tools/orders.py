"""Orders of a shop. A real tool would ask a database; in a replay none of this runs."""

ORDERS = {
    17: {"item": "kettle", "price": 39.0, "daysAgo": 12},
    18: {"item": "lamp", "price": 25.0, "daysAgo": 91},
}


def find(ctx, input):
    """The order of this number."""
    order = ORDERS.get(input["number"])
    return {"found": False} if order is None else {"found": True, **order}


handlers = {"find": find}
