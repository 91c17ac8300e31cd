//! The text of a chain's kernel, which NVRTC compiles as it does the `.cu` files. A warp has a row,
//! or a thread an element. What is the same in all elements of a loop is computed before it. The
//! length of the outermost dimension is an argument, so that batches of all sizes share a kernel;
//! pointers are those of a view's first element, so that slices of one tensor share it, too.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::sync::Mutex;

use super::steps::{Chain, ChainStep, ChainView, Function, OPERANDS_MAX, is_whole};
use crate::DType;
use crate::launch::{CuFile, text_of};
use crate::panics::lock;

/// The most steps that a kernel's name lists.
const NAMED_MAX: usize = 8;

impl Chain {
    /// The kernel for operands of these dtypes: outputs, then inputs.
    pub(super) fn source(&self, dtypes: [DType; OPERANDS_MAX]) -> &'static CuFile {
        static KEPT: Mutex<Option<HashMap<String, &'static CuFile>>> = Mutex::new(None);
        let make = || {
            let text = self.text(&dtypes);
            let mut kept = lock(&KEPT);
            let kept = kept.get_or_insert_default();
            *kept.entry(text).or_insert_with_key(|text| {
                // For the rest of the process, as the loaded modules are.
                let [name, text] = [self.kernel_name(), text.clone()].map(|it| &*it.leak());
                Box::leak(Box::new(CuFile::new(name, text)))
            })
        };
        let (known, source) = self.source.get_or_init(|| (dtypes, make()));
        if *known == dtypes { source } else { make() }
    }

    fn text(&self, dtypes: &[DType; OPERANDS_MAX]) -> String {
        text_of("chain.cu", include_str!("../chain.cu")).into_owned() + &self.kernel(dtypes)
    }

    /// What it computes, in order.
    fn kernel_name(&self) -> String {
        let words: Vec<&str> = (self.steps.iter())
            .filter_map(|step| match step {
                ChainStep::Apply(function, _) => Some(function.name()),
                ChainStep::Sum(_) => Some("row sum"),
                ChainStep::Max(_) => Some("row max"),
                _ => None,
            })
            .collect();
        let more = match words.len().saturating_sub(NAMED_MAX) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let named = &words[..words.len().min(NAMED_MAX)];
        format!("chain {}{more}", named.join(" "))
            .trim_end()
            .replace(' ', "_")
    }

    /// The kernel below the functions that it uses.
    pub(super) fn kernel(&self, dtypes: &[DType; OPERANDS_MAX]) -> String {
        let mut text = format!("\nKERNEL(BLOCK_THREADS) {}(", self.kernel_name());
        for (out, &dtype) in dtypes[..self.stores.len()].iter().enumerate() {
            _ = write!(text, "{}* out{out}, ", name_of(dtype));
        }
        for x in 0..self.loads.len() {
            _ = write!(
                text,
                "const {}* x{x}, ",
                name_of(dtypes[self.stores.len() + x])
            );
        }
        text += "u64 count) {\n";
        let all = |is_wide: bool, range: std::ops::Range<usize>| -> Vec<usize> {
            range
                .filter(|&step| self.is_row_wide[step] == is_wide)
                .collect()
        };
        let end = self.steps.len();
        let element = |steps: Vec<usize>| self.lines(&steps, dtypes, "i");
        if self.row == 0 {
            text += &self.lines(&all(true, 0..end), dtypes, "0");
            text += "for (u64 i = first_index(); i < count; i += grid_threads()) {\n";
            text += &element(all(false, 0..end));
            return text + "}\n}\n";
        }
        let length = self.row_length();
        text += "const u64 row = row_of_warp(), lane = threadIdx.x % WARP;\nif (row >= count) return;\n";
        let each = format!(
            "for (u64 i = row * {length} + lane; i < (row + 1) * {length}; i += WARP) {{\n"
        );
        let begin = format!("row * {length}");
        let mut from = 0;
        for at in 0..=end {
            let (value, adds) = match self.steps.get(at) {
                Some(ChainStep::Sum(value)) => (Some(*value), true),
                Some(ChainStep::Max(value)) => (Some(*value), false),
                Some(_) => continue,
                None => (None, true),
            };
            text += &self.lines(&all(true, from..at), dtypes, &begin);
            from = at;
            let Some(value) = value else {
                let stores = (0..end).filter(|&it| matches!(self.steps[it], ChainStep::Store(..)));
                let wanted = stores.filter(|&it| !self.is_row_wide[it]);
                let needed = self.needed(wanted.collect());
                if !needed.is_empty() {
                    text = text + &each + &element(needed) + "}\n";
                }
                continue;
            };
            let first = if adds { "0.0f" } else { "-infinity()" };
            let next = if adds {
                format!("v{at} + v{value}")
            } else {
                format!("Largest()(v{at}, v{value})")
            };
            _ = write!(text, "float v{at} = {first};\n{each}");
            if !self.is_row_wide[value] {
                text += &element(self.needed(vec![value]));
            }
            _ = writeln!(text, "v{at} = {next};\n}}");
            let of_warp = if adds { "warp_sum" } else { "0.0f + warp_max" };
            _ = writeln!(text, "v{at} = {of_warp}(v{at});");
        }
        text + "}\n"
    }

    /// These steps and those that they need within the loop over a row, in order.
    fn needed(&self, wanted: Vec<usize>) -> Vec<usize> {
        let mut is_needed = vec![false; self.steps.len()];
        wanted.into_iter().for_each(|step| is_needed[step] = true);
        for step in (0..self.steps.len()).rev() {
            if !is_needed[step] {
                continue;
            }
            match self.steps[step] {
                ChainStep::Apply(function, values) => {
                    values[..function.arguments()]
                        .iter()
                        .for_each(|&it| is_needed[it] = true);
                }
                ChainStep::Store(_, value) => is_needed[value] = true,
                _ => {}
            }
        }
        (0..self.steps.len())
            .filter(|&it| is_needed[it] && !self.is_row_wide[it])
            .collect()
    }

    /// The lines of these steps, at element `at` of the index space.
    fn lines(&self, steps: &[usize], dtypes: &[DType], at: &str) -> String {
        let mut text = String::new();
        let views = steps.iter().filter_map(|&step| match self.steps[step] {
            ChainStep::Load(load) => Some(&self.loads[load]),
            ChainStep::Store(store, _) => Some(&self.stores[store]),
            _ => None,
        });
        if views.into_iter().any(|view| !is_whole(view, &self.dims)) {
            _ = writeln!(text, "u64 rest = {at};");
            for (dim, &length) in self.dims.iter().enumerate().skip(1).rev() {
                _ = writeln!(
                    text,
                    "const u64 d{dim} = rest % {length};\nrest /= {length};"
                );
            }
            text += "const u64 d0 = rest;\n";
        }
        let place = |view: &ChainView| {
            if is_whole(view, &self.dims) {
                return at.to_string();
            }
            let mut place = "0".to_string();
            for (dim, stride) in view.strides.iter().enumerate().filter(|(_, it)| **it > 0) {
                _ = write!(place, " + d{dim} * {stride}");
            }
            place
        };
        for &step in steps {
            _ = match self.steps[step] {
                ChainStep::Load(load) => {
                    let place = place(&self.loads[load]);
                    writeln!(text, "const float v{step} = wide(x{load}[{place}]);")
                }
                ChainStep::Constant(value) => {
                    let bits = (value as f32).to_bits();
                    writeln!(text, "const float v{step} = __uint_as_float({bits}u);")
                }
                ChainStep::Apply(function, [a, b, c]) => {
                    let value = formula(function, [a, b, c].map(|it| format!("v{it}")));
                    writeln!(text, "const float v{step} = {value};")
                }
                ChainStep::Store(store, value) => {
                    let place = place(&self.stores[store]);
                    let dtype = name_of(dtypes[store]);
                    let only = if self.is_row_wide[step] {
                        "if (lane == 0) "
                    } else {
                        ""
                    };
                    writeln!(
                        text,
                        "{only}out{store}[{place}] = narrow<{dtype}>(v{value});"
                    )
                }
                ChainStep::Sum(_) | ChainStep::Max(_) => Ok(()),
            };
        }
        if text.starts_with("u64 rest") && at != "i" {
            // Other lines of the kernel have their own indices.
            let values = steps.iter().filter(|&&it| {
                !matches!(
                    self.steps[it],
                    ChainStep::Store(..) | ChainStep::Sum(_) | ChainStep::Max(_)
                )
            });
            let mut outside = String::new();
            for step in values {
                _ = writeln!(outside, "float v{step};");
            }
            text = format!("{outside}{{\n{}}}\n", text.replace("const float v", "v"));
        }
        text
    }
}

/// The type of an operand's elements in CUDA.
fn name_of(dtype: DType) -> &'static str {
    match dtype {
        DType::BF16 => "bf16",
        _ => "float",
    }
}

/// A function in CUDA, as `apply` in cpu.rs computes it.
fn formula(function: Function, [a, b, c]: [String; 3]) -> String {
    match function {
        Function::Add => format!("{a} + {b}"),
        Function::Sub => format!("{a} - {b}"),
        Function::Mul => format!("{a} * {b}"),
        Function::Div => format!("{a} / {b}"),
        Function::Min => format!("is_nan({a}) || {a} < {b} ? {a} : {b}"),
        Function::Max => format!("is_nan({a}) || {a} > {b} ? {a} : {b}"),
        Function::Less => format!("{a} < {b} ? 1.0f : 0.0f"),
        Function::LessEqual => format!("{a} <= {b} ? 1.0f : 0.0f"),
        Function::Equal => format!("{a} == {b} ? 1.0f : 0.0f"),
        Function::Where => format!("{a} != 0.0f ? {b} : {c}"),
        Function::Neg => format!("{a} * -1.0f"),
        Function::Abs => format!("fabsf({a})"),
        Function::Exp => format!("exponential({a})"),
        Function::Log => format!("logarithm({a})"),
        Function::Sqrt => format!("sqrtf({a})"),
        Function::Rsqrt => format!("1.0f / sqrtf({a})"),
        Function::Tanh => format!("hyperbolic_tangent({a})"),
        Function::Sigmoid => format!("sigmoid({a})"),
        Function::Activation(it) => format!("{}<float>::value({a})", it.kind()),
        Function::Gradient(it) => format!("{}<float>::chain({a}, {b})", it.kind()),
        Function::Round => format!("wide(narrow<bf16>({a}))"),
    }
}
