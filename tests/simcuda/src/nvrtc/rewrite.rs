//! From preprocessed kernel source to what g++ compiles: finds the kernels, tells the runtime where
//! their shared memory is, and appends the table of kernels.
//!
//! It works on tokens: kernels are found by `__global__`, shared memory by `__shared__`, enclosing
//! functions by brackets. Everything else, including errors, is left to g++.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Write as _;

use super::token::{TokenKind, Tokens};
use crate::kernel::SHARED_PREFIX;

/// What the preprocessor leaves of `#include <cuda_fp16.h>`, so that only programs that include it
/// get the types.
pub(super) const HEADER_PRAGMA: &str = "pragma simcuda header ";

/// A function of the source.
#[derive(Default)]
struct Function {
    name: String,
    /// With its namespaces.
    path: String,
    line: u32,
    is_kernel: bool,
    is_template: bool,
    is_extern_c: bool,
    /// The arguments of `__launch_bounds__`.
    bounds: String,
    /// All names in its body: what it may call.
    names: BTreeSet<String>,
    has_shared: bool,
    /// A bit for each parameter of a kernel that is a `const T* __restrict__`.
    cached: u64,
}

/// What an open brace belongs to.
enum Scope {
    Namespace(String),
    ExternC,
    Function,
    Other,
}

/// A rewritten source.
#[derive(Debug)]
pub(super) struct Rewritten {
    /// What g++ compiles after the shim.
    pub(super) text: String,
    /// The names for cuModuleGetFunction, for each name expression.
    pub(super) lowered: BTreeMap<String, String>,
}

struct Scanner<'a> {
    tokens: Tokens<'a>,
    scopes: Vec<Scope>,
    /// Of the innermost function, and how many scopes were open outside it.
    function: Option<(usize, usize)>,
    functions: Vec<Function>,
    /// Shared memory at file scope is a separate group.
    has_file_shared: bool,
    /// The names of static shared variables.
    shared_names: BTreeSet<String>,
    /// Where the present declaration or statement begins.
    head: usize,
    /// Replacements in the text, which do not overlap.
    edits: Vec<(std::ops::Range<usize>, String)>,
    errors: Vec<(u32, String)>,
}

/// Rewrites `text`, the preprocessed source of the program `name`. The error is a log.
pub(super) fn rewrite(name: &str, text: &str, expressions: &[String]) -> Result<Rewritten, String> {
    let mut scanner = Scanner {
        tokens: Tokens::of(text),
        scopes: Vec::new(),
        function: None,
        functions: Vec::new(),
        has_file_shared: false,
        shared_names: BTreeSet::new(),
        head: 0,
        edits: Vec::new(),
        errors: Vec::new(),
    };
    scanner.scan();
    if !scanner.errors.is_empty() {
        let log = scanner
            .errors
            .iter()
            .map(|(line, error)| format!("{name}:{line}: error: {error}\n"))
            .collect();
        return Err(log);
    }
    let mut out = String::from("#include \"language.h\"\n");
    for header in scanner
        .tokens
        .directives
        .iter()
        .filter_map(|directive| directive.strip_prefix(HEADER_PRAGMA))
    {
        let _ = writeln!(out, "#include \"{}\"", header.trim());
    }
    // Nothing of the source is exported: unused kernels and helpers cost nothing.
    out.push_str("namespace {\n");
    let mut at = 0;
    scanner.edits.sort_by_key(|(range, _)| range.start);
    for (range, replacement) in &scanner.edits {
        out.push_str(&text[at..range.start]);
        out.push_str(replacement);
        at = range.end;
    }
    out.push_str(&text[at..]);
    out.push_str("\n}\n");
    let lowered = scanner.table(name, expressions, &mut out);
    Ok(Rewritten { text: out, lowered })
}

impl Scanner<'_> {
    fn scan(&mut self) {
        let mut index = 0;
        while index < self.tokens.all.len() {
            let word = self.tokens.word(index);
            match word {
                "{" => self.open(index),
                "}" => self.close(index),
                ";" => self.head = index + 1,
                "__shared__" => index = self.shared(index),
                "__device__" | "__managed__" if self.function.is_none() => {
                    self.refuse_variable(index)
                }
                "asm" => index = self.assembly(index),
                _ => {}
            }
            if let Some((function, _)) = self.function
                && self
                    .tokens
                    .all
                    .get(index)
                    .is_some_and(|token| token.kind == TokenKind::Name)
            {
                self.functions[function].names.insert(word.to_owned());
            }
            index += 1;
        }
    }

    fn open(&mut self, index: usize) {
        let scope = if self.function.is_some() {
            Scope::Other
        } else {
            self.scope_of_head(index)
        };
        if matches!(scope, Scope::Function) {
            self.function = Some((self.functions.len() - 1, self.scopes.len()));
        }
        self.scopes.push(scope);
        self.head = index + 1;
    }

    fn close(&mut self, index: usize) {
        self.scopes.pop();
        if self
            .function
            .is_some_and(|(_, outside)| self.scopes.len() <= outside)
        {
            self.function = None;
        }
        self.head = index + 1;
    }

    /// What the brace at `open` begins, from the tokens before it.
    fn scope_of_head(&mut self, open: usize) -> Scope {
        let head = self.head..open;
        if head.is_empty() {
            return Scope::Other;
        }
        let has = |wanted: &str| head.clone().any(|index| self.tokens.word(index) == wanted);
        if has("namespace") {
            let name = head
                .clone()
                .rev()
                .map(|index| self.tokens.word(index))
                .take_while(|word| *word != "namespace");
            let name: Vec<&str> = name.filter(|word| *word != "inline").collect();
            return Scope::Namespace(name.into_iter().rev().collect());
        }
        if open == self.head + 2 && self.tokens.word(self.head) == "extern" {
            return Scope::ExternC;
        }
        match self.function_of_head(head.start, open) {
            Some(function) => {
                self.functions.push(function);
                Scope::Function
            }
            None => Scope::Other,
        }
    }

    /// The function that a head declares: the name before its first parenthesis that is not an
    /// attribute's.
    fn function_of_head(&self, from: usize, to: usize) -> Option<Function> {
        let mut function = Function {
            line: self.tokens.all[from].line,
            ..Function::default()
        };
        let mut index = from;
        while index < to {
            match self.tokens.word(index) {
                "__global__" => function.is_kernel = true,
                "template" => {
                    function.is_template = true;
                    index = self.behind_angle(index + 1);
                    continue;
                }
                "class" | "struct" | "union" | "enum" | "=" if function.name.is_empty() => {
                    return None;
                }
                "extern" => function.is_extern_c |= self.tokens.word(index + 1) == "\"C\"",
                word @ ("__launch_bounds__" | "__attribute__" | "__align__" | "alignas"
                | "decltype" | "__cluster_dims__") => {
                    let behind = self.tokens.behind_bracket(index + 1);
                    if word == "__launch_bounds__" {
                        function.bounds = self.tokens.between(index + 2, behind - 1).to_owned();
                    }
                    index = behind;
                    continue;
                }
                "(" if function.name.is_empty() && index > from => {
                    function.name = self.tokens.word(index - 1).to_owned();
                    function.line = self.tokens.all[index - 1].line;
                    let behind = self.tokens.behind_bracket(index);
                    function.cached = self.cached_parameters(index + 1, behind - 1);
                    index = behind;
                    continue;
                }
                _ => {}
            }
            index += 1;
        }
        if function.name.is_empty() {
            return None;
        }
        function.is_extern_c |= self
            .scopes
            .iter()
            .any(|scope| matches!(scope, Scope::ExternC));
        for scope in &self.scopes {
            if let Scope::Namespace(name) = scope
                && !name.is_empty()
            {
                let _ = write!(function.path, "{name}::");
            }
        }
        function.path.push_str(&function.name);
        Some(function)
    }

    /// The parameters that a compiler may read through the cache of `__ldg`, a bit each.
    fn cached_parameters(&self, from: usize, to: usize) -> u64 {
        let (mut cached, mut parameter, mut angles) = (0, 0, 0_usize);
        let (mut is_const, mut is_pointer_to_const) = (false, false);
        for index in from..to {
            match self.tokens.word(index) {
                "<" => angles += 1,
                ">" => angles = angles.saturating_sub(1),
                "const" if angles == 0 => is_const = true,
                "*" => is_pointer_to_const = std::mem::take(&mut is_const),
                "__restrict__" | "__restrict" if is_pointer_to_const && parameter < u64::BITS => {
                    cached |= 1 << parameter;
                }
                "," if angles == 0 => {
                    parameter += 1;
                    (is_const, is_pointer_to_const) = (false, false);
                }
                _ => {}
            }
        }
        cached
    }

    /// The index after `<…>`.
    fn behind_angle(&self, open: usize) -> usize {
        let mut depth = 0_usize;
        let mut index = open;
        while index < self.tokens.all.len() {
            match self.tokens.word(index) {
                "<" => depth += 1,
                ">" => depth = depth.saturating_sub(1),
                "(" => {
                    index = self.tokens.behind_bracket(index);
                    continue;
                }
                "{" | ";" => return index,
                _ => {}
            }
            index += 1;
            if depth == 0 {
                break;
            }
        }
        index
    }

    /// A declaration with `__shared__` at `index`. Returns the last index that was handled.
    fn shared(&mut self, index: usize) -> usize {
        let end = self.end_of_statement(index);
        let line = self.tokens.all[index].line;
        let first = self.head.min(index);
        if (first..end).any(|at| self.tokens.word(at) == "extern") {
            return self.dynamic(first, end, line);
        }
        if let Some(before) = (first..index).find(|at| self.tokens.word(*at) == "static") {
            self.edits
                .push((self.tokens.all[before].range.clone(), String::new()));
        }
        let group = match self.function {
            Some((function, _)) => {
                self.functions[function].has_shared = true;
                function.to_string()
            }
            None => {
                self.has_file_shared = true;
                "file".to_owned()
            }
        };
        // The declaration becomes one of types. A variable of such a type has margins and a name
        // that can be found in the library; the source name refers to what is between the margins.
        self.edits
            .push((self.tokens.all[index].range.clone(), "typedef".to_owned()));
        let mut variables = String::new();
        for name in self.declared(index + 1, end) {
            let (range, word) = (self.tokens.all[name].range.clone(), self.tokens.word(name));
            let (kind, renamed) = (
                format!("simcuda_type_{group}_{word}"),
                format!("{SHARED_PREFIX}{group}_{word}"),
            );
            let _ = write!(
                variables,
                " static __attribute__((aligned(1024))) simcuda::Shared<{kind}> {renamed}; \
                 [[maybe_unused]] constexpr auto& {word} = {renamed}.value;"
            );
            self.shared_names.insert(word.to_owned());
            self.edits.push((range, kind));
        }
        if variables.is_empty() || end >= self.tokens.all.len() {
            self.errors.push((
                line,
                "this declaration of __shared__ memory is not understood".to_owned(),
            ));
            return end;
        }
        let behind = self.tokens.all[end].range.end;
        self.edits.push((behind..behind, variables));
        end - 1
    }

    /// A global variable of the device, declared at `index`: nothing would watch its bounds, its
    /// races, or what is in it when a module is loaded.
    fn refuse_variable(&mut self, index: usize) {
        let mut at = index + 1;
        loop {
            at = match self.tokens.word(at) {
                "__attribute__" | "__align__" | "alignas" | "decltype" | "__launch_bounds__" => {
                    self.tokens.behind_bracket(at + 1)
                }
                "[" if self.tokens.word(at + 1) == "[" => self.tokens.behind_bracket(at),
                "(" | "operator" | "class" | "" => return,
                "=" | ";" | "[" | "{" => break,
                _ => at + 1,
            };
        }
        let error = "global variables of the device are not simulated: pass memory as an argument";
        self.errors
            .push((self.tokens.all[index].line, error.to_owned()));
    }

    /// `asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(to) : "f"(from))` becomes a call of the shim's model,
    /// `simcuda::ptx::cvt_rn_bf16_f32(to, from)`. Returns the last index that was handled.
    fn assembly(&mut self, index: usize) -> usize {
        let end = self.end_of_statement(index);
        let open = index + 1 + usize::from(self.tokens.word(index + 1) == "volatile");
        let mut at = open + 1;
        let mut instruction = String::new();
        while self.tokens.word(at).starts_with('"') {
            instruction += self.tokens.word(at).trim_matches('"');
            at += 1;
        }
        let instruction = instruction.trim_end_matches(';');
        let (name, rest) = instruction.split_once(' ').unwrap_or((instruction, ""));
        if name.is_empty() {
            // It only keeps the compiler from moving what it names.
            let range = self.tokens.all[index].range.start..self.tokens.all[end - 1].range.end;
            self.edits.push((range, String::new()));
            return end - 1;
        }
        let mut operands = Vec::new();
        while at < end {
            if self.tokens.word(at) == "(" {
                let behind = self.tokens.behind_bracket(at);
                operands.push(self.tokens.between(at + 1, behind - 1));
                at = behind;
            } else {
                at += 1;
            }
        }
        // Braces make vectors of operands, which the model takes one by one; brackets, addresses.
        // A number in the text is an operand, too.
        let rest = rest.replace(['{', '}', '[', ']'], "");
        let (mut given, mut next) = (Vec::new(), 0);
        for word in rest
            .split(',')
            .map(str::trim)
            .filter(|word| !word.is_empty())
        {
            if word.parse::<u32>().is_ok() {
                given.push(word.to_owned());
            } else if word == format!("%{next}") {
                given.extend(operands.get(next).map(ToString::to_string));
                next += 1;
            } else {
                next = usize::MAX;
                break;
            }
        }
        if next != operands.len() {
            let error = "only one PTX instruction with all operands in their order is simulated";
            self.errors
                .push((self.tokens.all[index].line, error.to_owned()));
            return end;
        }
        let range = self.tokens.all[index].range.start..self.tokens.all[end - 1].range.end;
        let lines = "\n".repeat(self.tokens.text[range.clone()].matches('\n').count());
        let model = name.replace("::", "_").replace('.', "_");
        let call = format!("simcuda::ptx::{model}({}){lines}", given.join(", "));
        self.edits.push((range, call));
        end - 1
    }

    /// The index of the `;` that ends the statement at `from`.
    fn end_of_statement(&self, from: usize) -> usize {
        let mut index = from;
        while index < self.tokens.all.len() {
            index = match self.tokens.word(index) {
                ";" => return index,
                "(" | "[" | "{" => self.tokens.behind_bracket(index),
                _ => index + 1,
            };
        }
        index
    }

    /// The indices of the declared names.
    fn declared(&mut self, from: usize, end: usize) -> Vec<usize> {
        let (mut names, mut last, mut angles) = (Vec::new(), None, 0_usize);
        let mut index = from;
        while index < end {
            let word = self.tokens.word(index);
            match word {
                "<" => angles += 1,
                ">" => angles = angles.saturating_sub(1),
                "," if angles == 0 => names.extend(last.take()),
                "=" if angles == 0 => {
                    let error =
                        "an initializer is not allowed for a __shared__ variable".to_owned();
                    self.errors.push((self.tokens.all[index].line, error));
                    return vec![index];
                }
                // The name precedes its sizes.
                "(" | "[" | "{" => {
                    index = self.tokens.behind_bracket(index);
                    continue;
                }
                word @ ("alignas" | "__align__" | "__attribute__") => {
                    let behind = self.tokens.behind_bracket(index + 1);
                    if word == "alignas" && behind < end {
                        // After `static`, C++ accepts the attribute but not alignas.
                        self.edits.push((
                            self.tokens.all[index].range.clone(),
                            "__attribute__((aligned".to_owned(),
                        ));
                        let close = self.tokens.all[behind - 1].range.end;
                        self.edits.push((close..close, "))".to_owned()));
                    }
                    index = behind;
                    continue;
                }
                _ if angles == 0 && self.tokens.all[index].kind == TokenKind::Name => {
                    last = Some(index)
                }
                _ => {}
            }
            index += 1;
        }
        names.extend(last);
        names
    }

    /// `extern __shared__ T name[];` becomes a pointer to the block's dynamic memory.
    fn dynamic(&mut self, first: usize, end: usize, line: u32) -> usize {
        let bracket = (first..end)
            .find(|at| self.tokens.word(*at) == "[")
            .filter(|at| *at > first);
        let Some(bracket) = bracket.filter(|bracket| self.tokens.word(bracket + 1) == "]") else {
            self.errors.push((
                line,
                "extern __shared__ memory is an array of no size: `extern __shared__ T name[];`"
                    .to_owned(),
            ));
            return end;
        };
        let mut kind = String::new();
        let mut at = first;
        while at < bracket - 1 {
            match self.tokens.word(at) {
                "extern" | "__shared__" | "static" => {}
                "__align__" | "alignas" | "__attribute__" => {
                    at = self.tokens.behind_bracket(at + 1);
                    continue;
                }
                word => {
                    kind.push_str(word);
                    kind.push(' ');
                }
            }
            at += 1;
        }
        let name = self.tokens.word(bracket - 1);
        // The sizes of further dimensions.
        let inner = self.tokens.between(bracket + 2, end);
        let pointer = if inner.is_empty() {
            format!("{kind}* const {name} = ({kind}*)")
        } else {
            format!("{kind}(* const {name}){inner} = ({kind}(*){inner})")
        };
        let range = self.tokens.all[first].range.start..self.tokens.all[end - 1].range.end;
        // Line breaks inside the declaration are kept so that later lines keep their numbers.
        let lines = "\n".repeat(self.tokens.text[range.clone()].matches('\n').count());
        self.edits.push((
            range,
            format!("[[maybe_unused]] {pointer}simcuda_dynamic_shared{lines}"),
        ));
        // The scanner handles the `;`.
        end - 1
    }

    /// The groups of shared memory that a function can reach through the names in its body.
    fn groups(&self, function: usize) -> Vec<String> {
        let mut by_name: HashMap<&str, Vec<usize>> = HashMap::new();
        for (index, function) in self.functions.iter().enumerate() {
            by_name.entry(&function.name).or_default().push(index);
        }
        let mut reached = BTreeSet::from([function]);
        let mut open = vec![function];
        while let Some(index) = open.pop() {
            for name in &self.functions[index].names {
                for called in by_name.get(name.as_str()).into_iter().flatten() {
                    if reached.insert(*called) {
                        open.push(*called);
                    }
                }
            }
        }
        let file = self.has_file_shared.then(|| "file".to_owned());
        let of_functions = reached
            .into_iter()
            .filter(|index| self.functions[*index].has_shared)
            .map(|index| index.to_string());
        file.into_iter().chain(of_functions).collect()
    }

    /// Where static shared variables are named, for messages: `kernel.cu:12 tile\\n`.
    fn shared_uses(&self) -> String {
        let mut uses = BTreeSet::new();
        for (index, token) in self.tokens.all.iter().enumerate() {
            let word = self.tokens.word(index);
            if self.shared_names.contains(word) {
                let file = token.file.rsplit('/').next().unwrap_or_default();
                uses.insert(format!("{file}:{} {word}\\n", token.line));
            }
        }
        uses.into_iter().collect()
    }

    /// Writes the table of kernels.
    fn table(
        &self,
        name: &str,
        expressions: &[String],
        out: &mut String,
    ) -> BTreeMap<String, String> {
        let mut exported: Vec<(String, String, usize)> = Vec::new();
        for (index, function) in self.functions.iter().enumerate() {
            if function.is_kernel && function.is_extern_c && !function.is_template {
                exported.push((function.name.clone(), function.path.clone(), index));
            }
        }
        let mut lowered = BTreeMap::new();
        for (number, expression) in expressions.iter().enumerate() {
            let path = expression.trim().trim_start_matches('&');
            let plain = path
                .split('<')
                .next()
                .unwrap_or_default()
                .trim()
                .trim_start_matches("::");
            let found = self.functions.iter().position(|function| {
                function.is_kernel && (function.path == plain || function.name == plain)
            });
            // g++ reports an expression that names no kernel.
            let function = found.unwrap_or(usize::MAX);
            match exported
                .iter()
                .find(|(_, path, index)| *index == function && path == plain)
            {
                Some((symbol, ..)) => lowered.insert(expression.clone(), symbol.clone()),
                None => {
                    let symbol = format!("simcuda_expression_{number}");
                    exported.push((symbol.clone(), path.to_owned(), function));
                    lowered.insert(expression.clone(), symbol)
                }
            };
        }
        for (number, (symbol, path, index)) in exported.iter().enumerate() {
            let (bounds, line, groups, cached) = match self.functions.get(*index) {
                Some(function) => (
                    function.bounds.as_str(),
                    function.line,
                    self.groups(*index),
                    function.cached,
                ),
                None => ("", 1, Vec::new(), 0),
            };
            // Bounds of a template may use its parameters, whose values are unknown here.
            let is_template = self
                .functions
                .get(*index)
                .is_some_and(|function| function.is_template);
            let bounds = if is_template { "" } else { bounds };
            // Evaluated where they were declared.
            let namespace = path.rsplit_once("::").map_or(String::new(), |(outer, _)| {
                format!("using namespace {outer}; ")
            });
            let namespace = if is_template {
                String::new()
            } else {
                namespace
            };
            let _ = writeln!(
                out,
                "# {line} \"{name}\"\n\
                 static const simcuda::Kernel simcuda_kernel_{number} = simcuda::describe<&{path}>(\"{symbol}\", \
                 [] {{ {namespace}return simcuda::bounds({bounds}); }}(), \"{}\", {cached}ull);",
                groups.join(" ")
            );
        }
        let list: String = (0..exported.len())
            .map(|number| format!("&simcuda_kernel_{number}, "))
            .collect();
        let _ = writeln!(
            out,
            "static const simcuda::Kernel* const simcuda_kernels[] = {{{list}nullptr}};\n\
             extern \"C\" __attribute__((visibility(\"default\"))) const simcuda::Library simcuda_library;\n\
             extern \"C\" const simcuda::Library simcuda_library = {{simcuda::abi_version, {}, simcuda_kernels, simcuda_run, \
             simcuda_library_begin, simcuda_library_end, simcuda_dynamic_shared, \"{}\"}};",
            exported.len(),
            self.shared_uses()
        );
        lowered
    }
}
