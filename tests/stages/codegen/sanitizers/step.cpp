// Calls of kernels for decoding steps: a program of every operation, and indices that are out of range.
#define KTC_UNIT stress_step

#include "ktc/interface/step.hpp"

#include <limits>
#include <numeric>
#include <stdexcept>

#include "calls.hpp"
#include "ktc/step/functions.hpp"
#include "ktc/step/indexing.hpp"
#include "ktc/step/program.hpp"
#include "ktc/step/rows.hpp"
#include "ktc/step/view.hpp"
#include "memory.hpp"

namespace stress {
namespace {

using namespace ktc;
using namespace ktc::step;

constexpr std::int64_t kRows = 3, kWidth = 333, kChosen = 5;

TensorArgument argument(const View& view) {
  return {.data = view.data,
          .type = view.type,
          .dims = view.dims(),
          .sizes = view.sizes.data(),
          .strides = view.strides.data()};
}

// A contiguous tensor of its own memory.
struct Tensor {
  Tensor(Type type, std::vector<std::int64_t> sizes) : view{.type = type, .sizes = std::move(sizes), .strides = {}} {
    view.strides.resize(view.sizes.size());
    std::int64_t stride = 1;
    for (std::size_t dim = view.sizes.size(); dim-- > 0; stride *= view.sizes[dim]) view.strides[dim] = stride;
    memory.resize(static_cast<std::size_t>(view.elements() * bytes_of(type)));
    view.data = memory.data();
  }

  void fill(std::mt19937& random) {
    std::normal_distribution<double> normal(0, 1);
    ktc::step::with_element(view.type, [&]<class Element>(Element) {
      auto* values = reinterpret_cast<Element*>(memory.data());
      for (std::int64_t each = 0; each < view.elements(); ++each) {
        const auto value = static_cast<float>(normal(random));
        if constexpr (std::is_same_v<Element, fp16>) {
          values[each] = fp16::nearest(value);
        } else if constexpr (std::is_same_v<Element, std::uint8_t>) {
          values[each] = value > 0 ? 1 : 0;
        } else if constexpr (std::is_integral_v<Element>) {
          values[each] = static_cast<Element>(5 * value);
        } else {
          values[each] = Element(value);
        }
      }
    });
  }

  View transposed() const {
    View turned = view;
    std::swap(turned.sizes[0], turned.sizes[1]);
    std::swap(turned.strides[0], turned.strides[1]);
    return turned;
  }

  std::vector<std::byte> memory;
  View view;
};

// A program and the tensors that it reads and writes.
class Recording {
 public:
  Recording(const StepKernel& kernel, Engine& engine, bool of_indices_alone)
      : kernel_(kernel), engine_(engine), random_(7) {
    for (const Type type : {Type::kBool, Type::kInt32, Type::kBf16, Type::kFp64, Type::kComplex64}) by_index(type);
    if (of_indices_alone) return;
    for (const Type type : {Type::kBf16, Type::kFp16, Type::kFp32, Type::kFp64, Type::kInt64, Type::kComplex64}) {
      functions(type);
    }
    for (const Type type : {Type::kBf16, Type::kFp16, Type::kFp32, Type::kFp64}) {
      along_rows(type);
      products(type);
    }
  }

  Written run() {
    program_.run(0, program_.size());
    Written written;
    for (const auto& tensor : tensors_) append(written, tensor->memory);
    return written;
  }

  // Whether every operation that reads an index refuses one out of range.
  bool refuses() {
    using Limits = std::numeric_limits<std::int64_t>;
    for (Tensor* indices : indices_) {
      auto* first = reinterpret_cast<std::int64_t*>(indices->memory.data());
      const std::int64_t before = *first;
      for (const std::int64_t hostile : {std::int64_t{-1}, std::int64_t{7}, Limits::min(), Limits::max()}) {
        *first = hostile;
        try {
          program_.run(0, program_.size());
          return false;
        } catch (const std::out_of_range&) {
        }
      }
      *first = before;
    }
    try {
      program_.run(0, program_.size() + 1);
      return false;
    } catch (const std::out_of_range&) {
      return true;
    }
  }

 private:
  Tensor& made(Type type, std::vector<std::int64_t> sizes) {
    tensors_.push_back(std::make_unique<Tensor>(type, std::move(sizes)));
    return *tensors_.back();
  }
  Tensor& random(Type type, std::vector<std::int64_t> sizes) {
    Tensor& tensor = made(type, std::move(sizes));
    tensor.fill(random_);
    return tensor;
  }

  static Type computed_in(Type type) { return type == Type::kBf16 || type == Type::kFp16 ? Type::kFp32 : type; }

  static bool takes(const NamedFunction& named, Type computed) {
    const bool bits = named.name == "and" || named.name == "or" || named.name == "exclusive_or" || named.name == "not";
    const bool divides = named.name == "divide" || named.name.find("reciprocal") == 0 || named.name == "log" ||
                         named.name.find("square_root") == 0 || named.name == "power";
    if (computed == Type::kComplex64) return named.name == "copy" || named.name == "multiply";
    if (computed == Type::kInt64)
      return !divides && named.name != "exp" && named.name != "sigmoid" && named.name != "silu" &&
             named.name != "gelu_tanh" && named.name != "softplus";
    return !bits;
  }

  // Each on whole rows, on columns, and on one row for all.
  void functions(Type type) {
    Tensor& x = random(type, {kRows, kWidth});
    Tensor& y = random(type, {kRows, kWidth});
    Tensor& z = random(type, {kRows, kWidth});
    View repeated = y.view;
    repeated.strides[0] = 0;
    for (const NamedFunction& named : kFunctions) {
      if (!takes(named, computed_in(type))) continue;
      const std::vector<View> rows[] = {{x.view, y.view, z.view}, {x.view, repeated, z.view}};
      for (const auto& views : rows) {
        const auto end = views.begin() + static_cast<std::ptrdiff_t>(named.inputs);
        const View out = made(type, {kRows, kWidth}).view;
        pointwise(named.function, out, {views.begin(), end}, type);
      }
      const std::vector<View> columns = {x.transposed(), y.transposed(), z.transposed()};
      const auto end = columns.begin() + static_cast<std::ptrdiff_t>(named.inputs);
      const View out = made(type, {kWidth, kRows}).view;
      pointwise(named.function, out, {columns.begin(), end}, type);
    }
    if (type == Type::kComplex64) return;
    for (const Type other : {Type::kBool, Type::kInt32, Type::kBf16, Type::kFp32, Type::kFp64}) {
      pointwise(Function::kCopy, made(other, {kRows, kWidth}).view, {x.view}, type);
    }
  }

  void pointwise(Function function, const View& out, const std::vector<View>& inputs, Type type) {
    std::vector<TensorArgument> given;
    for (const View& input : inputs) given.push_back(argument(input));
    program_.add(kernel_.pointwise(function, argument(out), given.data(), given.size(), computed_in(type)));
  }

  void along_rows(Type type) {
    const Type computed = computed_in(type);
    for (const std::int64_t width : {kWidth, std::int64_t{1}, std::int64_t{640}}) {
      Tensor& x = random(type, {kRows, width});
      for (const Reduction reduction : {Reduction::kSum, Reduction::kMean, Reduction::kMaximum}) {
        program_.add(kernel_.reduce(reduction, argument(made(type, {kRows}).view), argument(x.view), computed));
      }
      program_.add(kernel_.softmax(argument(made(type, {kRows, width}).view), argument(x.view), computed));
      const std::int64_t k = std::min(kChosen, width);
      for (const bool largest : {true, false}) {
        program_.add(TopK(made(type, {kRows, k}).view, made(Type::kInt64, {kRows, k}).view, x.view, largest, largest));
      }
    }
    const View columns = random(type, {kRows, kWidth}).transposed();
    program_.add(kernel_.reduce(Reduction::kSum, argument(made(type, {kWidth}).view), argument(columns), computed));
  }

  void products(Type type) {
    const auto product = [&](const View& out, const View& a, const View& b, const View& bias) {
      program_.add(kernel_.matrix_product(engine_, argument(out), argument(a), argument(b), argument(bias)));
    };
    const View none{.type = type, .sizes = {1, 1, 1}, .strides = {0, 0, 0}};
    const auto three = [&](std::int64_t batch, std::int64_t m, std::int64_t k, std::int64_t n) {
      const View a = random(type, {batch, m, k}).view, b = random(type, {batch, k, n}).view;
      View turned = random(type, {batch, n, k}).view;
      std::swap(turned.sizes[1], turned.sizes[2]);
      std::swap(turned.strides[1], turned.strides[2]);
      product(made(type, {batch, m, n}).view, a, b, none);
      product(made(type, {batch, m, n}).view, a, turned, random(type, {batch, m, n}).view);
    };
    three(1, 3, kWidth, 1100), three(3, 5, 37, 9), three(2, 9, 1, 3), three(1, 1, 17, 1), three(1, 600, 70, 2);
  }

  void by_index(Type type) {
    Tensor& cache = random(type, {kRows, 7, 9});
    Tensor& places = made(Type::kInt64, {2});
    Tensor& each = made(Type::kInt64, {kRows, 4, 9});
    auto* place = reinterpret_cast<std::int64_t*>(places.memory.data());
    place[0] = 6, place[1] = 0;
    auto* at = reinterpret_cast<std::int64_t*>(each.memory.data());
    for (std::int64_t index = 0; index < each.view.elements(); ++index) at[index] = index % 7;
    indices_.insert(indices_.end(), {&places, &each});
    program_.add(Gather(made(type, {kRows, 4, 9}).view, cache.view, each.view, 1));
    program_.add(Scatter(random(type, {kRows, 7, 9}).view, each.view, random(type, {kRows, 4, 9}).view, 1));
    program_.add(IndexedRows(cache.view, places.view, made(type, {kRows, 2, 9}).view, 1, false));
    program_.add(IndexedRows(random(type, {kRows, 7, 9}).view, places.view, random(type, {kRows, 2, 9}).view, 1, true));
  }

  const StepKernel& kernel_;
  Engine& engine_;
  std::mt19937 random_;
  std::vector<std::unique_ptr<Tensor>> tensors_;
  std::vector<Tensor*> indices_;
  Program program_;
};

}  // namespace

std::vector<Call> calls_of(const StepEntry& entry, const Facts&) {
  const auto kernel = std::shared_ptr<const StepKernel>(entry.make());
  return {{.name = "every operation",
           .run = [kernel](Engine& engine, int) { return Recording(*kernel, engine, false).run(); },
           .refuses = [kernel](Engine& engine) { return Recording(*kernel, engine, true).refuses(); }}};
}

}  // namespace stress
