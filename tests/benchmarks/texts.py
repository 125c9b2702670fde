"""Six texts of about 200 words or 300 tokens, and requests to edit them."""

LETTER = """Dear Mr Hansen, thank you for your order of twelve oak chairs and two round tables, \
which reached us on Monday. The chairs are in stock and can leave our workshop this week. The \
tables are made by hand and will need another ten days, because the wood has to dry before we \
can apply the second coat of oil. We would like to send everything in one delivery, so that you \
only have to be at home once. If you need the chairs earlier, please tell us and we will send \
them ahead at no extra cost. The driver will call you the evening before he comes and tell you \
the hour. Please make sure that the door to the yard is open, since the lorry is too wide for \
the front gate. Our two men will carry the furniture into the house, unpack it and take the \
boxes away. The bill is enclosed with this letter. You may pay within thirty days of the \
delivery, by bank transfer or in cash to the driver. If anything is not as you expected, call us \
within two weeks and we will repair it or take it back. We hope that you will enjoy the \
furniture for many years. With kind regards, Anna Berg, Berg and Sons."""

NOTICE = """The town library will be closed on Friday because the heating is being repaired. \
Books that are due on that day may be returned on Saturday without a fee. The box beside the \
main door stays open, so you can also leave your books there at any time. The reading room on \
the second floor will open again on Monday at nine. Until then, students may use the small hall \
in the town house across the street, which has twenty seats and a printer. The story hour for \
children will take place as usual on Wednesday at four, but in the school on Mill Road. Please \
bring a cushion, since there are not enough chairs. Our online catalogue works all the time, and \
you can order books there and pick them up later. Members who have ordered books for this Friday \
will get a message with a new date. The café on the ground floor is closed until the end of the \
month. We are looking for helpers who can move books from the cellar to the first floor on \
Thursday afternoon. There will be tea and cake for everybody who comes. If you have questions, \
write to us or ask at the desk. We are sorry for the trouble and thank you for your patience."""

RECIPE = """To make a simple bread you need one pound of flour, a spoon of salt, a small bag of \
yeast and three cups of warm water. Put the flour and the salt into a large bowl and mix them \
with your hand. Stir the yeast into the water and wait for five minutes until small bubbles \
rise. Pour the water into the bowl and mix everything with a wooden spoon until no dry flour is \
left. Cover the bowl with a cloth and let the dough rest in a warm place for two hours. It \
should become twice as large. Put some flour on the table, take the dough out of the bowl and \
fold it four times, like a letter. Shape it into a ball and lay it on a tray. Let it rest again \
for half an hour. In the meantime, heat the oven and put a small pot of water at the bottom, \
because steam makes the crust thin and crisp. Cut a cross into the top of the ball with a sharp \
knife. Bake the bread for forty minutes. It is done when it sounds hollow if you knock on its \
bottom. Let it cool on a rack for an hour before you cut it. It stays fresh for three days if \
you keep it in a clean cloth."""

REPORT = """The weather station on the island was built in the spring by six people. They came \
by boat with forty boxes of tools and instruments, and they stayed for eleven weeks. The first \
task was to find a place that was high enough to be safe from the waves and yet near to the \
landing. They chose a flat rock on the south side. The mast is nine metres high and carries \
instruments for wind, rain, light and temperature. Every ten minutes a small computer in the hut \
reads them and sends the numbers to the mainland by radio. The power comes from two solar panels \
and a wind wheel, and a battery keeps the station alive for eight days without sun or wind. In \
June a storm broke one of the ropes that hold the mast, and the people had to climb up in the \
night to replace it. Since then every rope has been doubled. In the first year the station lost \
only two hours of measurements, both times because birds had sat down on the radio dish. The \
measurements are free for everybody. Fishermen use them every morning, and the school on the \
mainland has made a large map with them. Next year a second station will be built on the \
northern island."""

CODE = """def read_orders(path):
    orders = []
    with open(path) as file:
        for line in file:
            name, amount, price = line.strip().split(",")
            orders.append({"name": name, "amount": int(amount), "price": float(price)})
    return orders


def total_price(orders):
    total = 0.0
    for order in orders:
        total += order["amount"] * order["price"]
    return total


def largest_order(orders):
    largest = None
    for order in orders:
        if largest is None or order["amount"] > largest["amount"]:
            largest = order
    return largest


def orders_of(orders, name):
    found = []
    for order in orders:
        if order["name"] == name:
            found.append(order)
    return found


def print_report(path):
    orders = read_orders(path)
    print("number of orders:", len(orders))
    print("total price:", total_price(orders))
    largest = largest_order(orders)
    print("largest order:", largest["name"], largest["amount"])
    for order in orders:
        print(order["name"], order["amount"], order["price"])
"""

RULES = """1. The workshop is open from eight in the morning to six in the evening.
2. Nobody works alone at the large saw.
3. Wear glasses at every machine that throws splinters.
4. Tie back long hair and take off scarves and loose jewellery.
5. Switch a machine off before you clean it, and pull the plug before you change a blade.
6. Put every tool back to where you found it.
7. Report a broken tool to the person at the desk and hang a red card on it.
8. Paint and oil are kept in the steel cupboard beside the door.
9. Rags with oil on them go into the bin with the lid, never into a pocket.
10. Eat and drink in the kitchen only.
11. Children under twelve years may watch from behind the yellow line.
12. Sweep your place before you leave, and shut the windows.
13. If somebody is hurt, press the green button; it calls the doctor in the next house.
14. In case of fire leave by the back door and meet under the big tree.
15. Members pay for wood by the metre; write what you took into the blue book.
16. Guests may come on Sundays, with a member who answers for them.
17. Whoever breaks these rules twice has to stay away for a month.
"""

TEXTS = (LETTER, NOTICE, RECIPE, REPORT, CODE, RULES)

_COPY = "Copy this text word for word, but replace {old} by {new}.\n\n{text}"
_AGAIN = "{text}\n\nRepeat the text above word for word, with {new} in place of {old}."
_CORRECT = "Correct the spelling mistakes in this text and write out the whole text:\n\n{text}"

# A model of 135 million weights often retells instead. Of five wordings each text has the one (or,
# where another one gave it an example to follow, the next) with which most of the answer's first
# 128 tokens stand in the text in this order; behind it that share, taken before any speed was.
EDITS = (
    _CORRECT.format(text=LETTER.replace("and", "adn", 1)),  # 0.92
    _AGAIN.format(text=NOTICE, old="Friday", new="Thursday"),  # 0.91
    _COPY.format(text=RECIPE, old="salt", new="sugar"),  # 0.73
    _AGAIN.format(text=REPORT, old="spring", new="autumn"),  # 0.98
    _CORRECT.format(text=CODE.replace("amount", "amuont", 1)),  # 0.88
    _COPY.format(text=RULES, old="saw", new="drill"),  # 0.80
)
"""Requests to write out a text with a small change."""
