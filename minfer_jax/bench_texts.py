"""What the bench asks of a model where guesses are measured: two answers that repeat, one that does
not.
"""

_CODE = '''\
class Account:
    """A bank account with a history of what was done."""

    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance
        self.history = []

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("the amount must be positive")
        self.balance += amount
        self.history.append(("deposit", amount))
        return self.balance

    def withdraw(self, amount):
        if amount <= 0:
            raise ValueError("the amount must be positive")
        if amount > self.balance:
            raise ValueError("the balance is too low")
        self.balance -= amount
        self.history.append(("withdraw", amount))
        return self.balance

    def transfer(self, other, amount):
        self.withdraw(amount)
        other.deposit(amount)
        self.history.append(("transfer", amount))
        return self.balance

    def report(self):
        for kind, amount in self.history:
            print(f"{kind}: {amount}")
        print(f"{self.owner} has {self.balance}")
'''
_PROSE = """\
The lighthouse at Skerry Point was built in 1874 by the engineer Alan Brebner. It stands 38 \
metres above the sea and its light can be seen for 21 miles. Three keepers lived there until \
1971, when the lamp was made automatic. "The nights were long, but the sea was never the same \
twice," the last keeper, Ewan Grant, told a newspaper. In winter the supply boat could be late \
by weeks, and the keepers lived on flour, salted fish and tea. "We counted the ships the way \
other people count the days," he said. Today the tower belongs to the parish, and visitors may \
climb its 152 steps on Sundays. "A light that nobody tends is only a lamp," reads the plate \
beside the door."""

PROMPTS = {
    "edit": "Rewrite this Python code with the class renamed from Account to Wallet. Print the "
    f"whole code again and change nothing else.\n\n```python\n{_CODE}```",
    "quotes": "Summarise the text and quote the sentences that matter most, word for word.\n\n"
    + _PROSE,
    "story": "Tell me a story about a girl who finds a door in the forest.",
}
