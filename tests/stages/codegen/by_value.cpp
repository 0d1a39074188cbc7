// A struct by value in two calls, and other calls between them. Exit status 0 if the second call reads it as it is.
struct Part {
  long expert, panel, first, size;
};

struct Order {
  long expert, panel, first, size;
  long sum() const;
  Part part() const;
};

[[gnu::noinline]] long Order::sum() const {
  return expert;
}
[[gnu::noinline]] Part Order::part() const {
  return {expert, panel, first, size};
}
[[gnu::noinline]] long offset_of(Part part) {
  return part.first * 64 + part.panel;
}

long seen;
[[gnu::noinline]] void begin(long, Part part) {
  seen = part.size;
}

[[gnu::noinline]] long run(const Order& order) {
  const Part part = order.part();
  const long offset = offset_of(part);
  const long sum = order.sum();  // its return address lies where `offset_of` had its struct
  begin(offset, part);
  return offset + sum;
}

int main() {
  const Order order{1, 2, 3, 4};
  run(order);
  return seen == order.size ? 0 : 1;
}
