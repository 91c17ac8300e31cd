//! A traced forward: operations in order, each with the values that it reads, and the first error.

use std::cell::RefCell;
use std::fmt;
use std::panic::Location;
use std::rc::Rc;
use std::sync::Arc;

use ddp_kernels::shape::RANK_MAX;

use super::op::{Constant, Op, Output, Reads, Role};
pub(super) use crate::scratch::NumberKind;

/// The most inputs of an operation.
pub(super) const INPUTS_MAX: usize = 16;

#[derive(Clone, Debug)]
pub(super) struct TraceNode {
    pub(super) op: Op,
    pub(super) inputs: Vec<usize>,
    pub(super) shape: Vec<usize>,
    /// Whether its first axis is the rows of the batch.
    pub(super) has_rows: bool,
    /// Backward computes it again, with all others of this number.
    pub(super) again: Option<usize>,
    /// The layer that has it.
    pub(super) place: Arc<str>,
    /// The line of the user's code that made it.
    pub(super) line: &'static Location<'static>,
}

/// A last layer: its output, its input, weight and perhaps mask, and the cap of logits.
pub(super) type HeadOf = (usize, Vec<usize>, f64);

#[derive(Debug, Default)]
pub(super) struct Trace {
    pub(super) nodes: Vec<TraceNode>,
    /// The names of values in messages. The last one given counts.
    pub(super) names: Vec<(usize, String)>,
    /// The first error, with the line of the formula.
    pub(super) error: Option<String>,
    /// What `TraceNode::again` is of new values.
    pub(super) again: Option<usize>,
    /// The layer that is being traced, which `TraceNode::place` is of new values.
    pub(super) place: Arc<str>,
    /// Where the user's code has called the layer that is being traced, for errors.
    pub(super) line: Option<&'static Location<'static>>,
    /// Whether the input is tokens.
    pub(super) input_is_tokens: bool,
    /// Whether operations leave the first axis of values that have rows alone, as in a module's
    /// forward. How many rows there are is then unknown.
    pub(super) hides_rows: bool,
    /// Masks of attention.
    pub(super) masks: Vec<KnownMask>,
    /// Where documents begin, once that is known.
    pub(super) begins: Option<usize>,
    /// The last layer, if any loss may run it.
    pub(super) head: Option<HeadOf>,
}

/// A value of a forward that is being traced. Its operations never fail: the first error, with its
/// line, is kept until the forward has been traced.
#[derive(Clone)]
pub struct Var {
    pub(super) trace: Rc<RefCell<Trace>>,
    pub(super) id: usize,
}

/// As messages describe it: how many rows there are is unknown.
impl fmt::Debug for Var {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.trace.borrow().described(self.id))
    }
}

/// The layer and line of an operation, for errors. A line in `core` is left out: it tells the user
/// nothing.
fn at(place: &str, line: &Location<'_>) -> String {
    match line.file() {
        file if file.contains("/library/core/") => place.to_string(),
        file => format!("{place} ({file}:{})", line.line()),
    }
}

impl TraceNode {
    /// An error of this operation.
    pub(super) fn error(&self, text: &str) -> String {
        format!("{}: {text}", at(&self.place, self.line))
    }

    /// The layer and the line, if that is the user's.
    pub(super) fn users_place(&self) -> Option<String> {
        is_users(self.line).then(|| at(&self.place, self.line))
    }
}

/// Whether a line is outside this crate and `core`.
fn is_users(line: &Location<'_>) -> bool {
    let (file, own) = (line.file(), file!().trim_end_matches("forward/trace.rs"));
    !file.starts_with(own) && !file.contains("/library/core/")
}

/// A mask of attention.
#[derive(Clone, Debug)]
pub(super) struct KnownMask {
    /// The value of shape (T, T).
    pub(super) square: usize,
    /// Whether it is not 0 for scores that are shown, or for hidden ones; None if it is added.
    pub(super) shows: Option<bool>,
    /// How many tokens each sees at most; None if it is not causal.
    pub(super) window: Option<usize>,
}

impl Trace {
    /// The numbers and the attention on which `output` depends.
    pub(super) fn decode_signature(&self, output: usize) -> Vec<usize> {
        let mut is_used = vec![false; output + 1];
        is_used[output] = true;
        for id in (0..=output).rev() {
            if is_used[id] {
                let inputs = self.nodes[id].inputs.iter();
                inputs.for_each(|&input| is_used[input] = true);
            }
        }
        let tells = |op: &Op| matches!(op, Op::Constant(_) | Op::Numbers(_) | Op::Attention(_));
        let all = (0..=output).filter(|&id| is_used[id] && tells(&self.nodes[id].op));
        all.collect()
    }

    /// The caller's line; if that is in this crate or in `core`, the last line outside them.
    #[track_caller]
    fn users_line(&self) -> &'static Location<'static> {
        let caller = Location::caller();
        self.line.filter(|_| !is_users(caller)).unwrap_or(caller)
    }

    /// Errors of this crate's code from here on name the caller's line. Returns the line before.
    #[track_caller]
    pub(super) fn begin_line(&mut self) -> Option<&'static Location<'static>> {
        let here = self.users_line();
        self.line.replace(here)
    }

    /// Keeps the first error, with the layer and the line.
    #[track_caller]
    pub(super) fn keep_error(&mut self, text: String) {
        let (place, line) = (self.place.clone(), self.users_line());
        self.keep_error_at(&place, line, text);
    }

    /// As `keep_error`, of an operation of this layer at this line.
    pub(super) fn keep_error_at(&mut self, place: &str, line: &Location<'_>, text: String) {
        self.error
            .get_or_insert(format!("{}: {text}", at(place, line)));
    }

    #[track_caller]
    pub(super) fn push(
        &mut self,
        op: impl Into<Op>,
        inputs: Vec<usize>,
        shape: Vec<usize>,
    ) -> usize {
        let (id, op) = (self.nodes.len(), op.into());
        let (again, place, line) = (self.again, self.place.clone(), self.users_line());
        let mut of_inputs = inputs.iter().map(|&it| self.nodes[it].has_rows);
        let has_rows = self.hides_rows && op.role() != Role::Output && of_inputs.any(|it| it);
        self.nodes.push(TraceNode {
            op,
            inputs,
            shape,
            has_rows,
            again,
            place,
            line,
        });
        id
    }

    /// The refusal of a formula on codes, which are tokens with where their documents begin.
    pub(super) fn codes_as_numbers(&self) -> Option<String> {
        let has_documents = self
            .nodes
            .iter()
            .any(|it| matches!(it.op, Op::Documents(_)));
        let reads_input = |mut id: usize| {
            while let Op::Reshape(_) | Op::Stop(_) = self.nodes[id].op {
                id = self.nodes[id].inputs[0];
            }
            id == 0
        };
        let reads = |it: &&TraceNode| matches!(it.op, Op::Cast(_)) && reads_input(it.inputs[0]);
        let node = self.nodes.iter().filter(|_| has_documents).find(reads)?;
        let text = "tokens: expected rows of one document each, because this formula reads tokens as \
                    numbers, got several documents in a row; help: give each document its own row";
        Some(node.error(text))
    }

    /// What a value is called in messages.
    pub(super) fn name(&self, id: usize) -> String {
        let known = self.names.iter().rev().find(|it| it.0 == id);
        known.map_or_else(|| self.nodes[id].op.name(), |(_, name)| name.clone())
    }

    /// The same, with its shape and, of a result, the line that has it.
    pub(super) fn described(&self, id: usize) -> String {
        let TraceNode { op, line, .. } = &self.nodes[id];
        let (name, shape) = (self.name(id), self.shape_text(id));
        if let Op::Constant(_) = op {
            return name;
        }
        if op.role() == Role::Leaf || !is_users(line) {
            return format!("{name} {shape}");
        }
        format!("{name} {shape} of {}:{}", line.file(), line.line())
    }

    /// `[rows, 4]`, or `[3, 4]` of a value that is the same for all rows.
    fn shape_text(&self, id: usize) -> String {
        let TraceNode {
            shape, has_rows, ..
        } = &self.nodes[id];
        let lengths = shape.iter().map(usize::to_string);
        let rows = has_rows.then(|| "rows".to_string());
        let lengths = rows.into_iter().chain(lengths.skip(usize::from(*has_rows)));
        format!("[{}]", lengths.collect::<Vec<_>>().join(", "))
    }
}

impl Var {
    /// The lengths of all axes, also of that of the rows.
    pub(crate) fn shape(&self) -> Vec<usize> {
        self.trace.borrow().nodes[self.id].shape.clone()
    }

    /// The lengths of the axes of a row: of all but the first one. A value that is the same for all
    /// rows, as a parameter is, has no axis of rows: the lengths of all its axes.
    pub fn row_shape(&self) -> Vec<usize> {
        self.shape().split_off(usize::from(self.has_rows()))
    }

    /// Whether the first axis is the rows of the batch. Which row is where does not change, and how
    /// many there are is unknown.
    pub fn has_rows(&self) -> bool {
        let trace = self.trace.borrow();
        trace.hides_rows && trace.nodes[self.id].has_rows
    }

    /// The lengths of all axes of a value like this one with these lengths of a row.
    pub(super) fn whole_shape(&self, lengths: &[usize]) -> Vec<usize> {
        let rows = self.has_rows().then(|| self.shape()[0]);
        rows.into_iter().chain(lengths.iter().copied()).collect()
    }

    /// The same value, which has rows if `has_rows`.
    pub(super) fn with_rows(self, has_rows: bool) -> Var {
        self.trace.borrow_mut().nodes[self.id].has_rows |= has_rows;
        self
    }

    /// What `body` makes of values whose first axis is one like any other. The result has rows if
    /// `has_rows`, and keeps them apart.
    #[track_caller]
    pub(super) fn with_all_axes(&self, has_rows: bool, body: impl FnOnce() -> Var) -> Var {
        // A closure does not pass on the caller's line.
        let line = self.trace.borrow_mut().begin_line();
        let hides = std::mem::take(&mut self.trace.borrow_mut().hides_rows);
        let made = body();
        {
            let trace = &mut self.trace.borrow_mut();
            (trace.hides_rows, trace.line) = (hides, line);
        }
        made.with_rows(has_rows)
    }

    /// The number of axes, of which the rows are one.
    pub fn rank(&self) -> usize {
        self.shape().len()
    }

    /// Its name and shape, for messages.
    pub(crate) fn described(&self) -> String {
        self.trace.borrow().described(self.id)
    }

    pub(super) fn op(&self) -> Op {
        self.trace.borrow().nodes[self.id].op.clone()
    }

    pub(super) fn inputs(&self) -> Vec<Var> {
        let inputs = self.trace.borrow().nodes[self.id].inputs.clone();
        inputs.into_iter().map(|id| self.at(id)).collect()
    }

    /// Another value of the trace.
    pub(super) fn at(&self, id: usize) -> Var {
        let trace = self.trace.clone();
        Var { trace, id }
    }

    /// A new value. An operation that does not take tokens reads them as numbers.
    #[track_caller]
    pub(super) fn push(&self, op: impl Into<Op>, inputs: &[&Var], shape: Vec<usize>) -> Var {
        let (op, mut read) = (op.into(), Vec::with_capacity(inputs.len()));
        let takes_tokens = matches!(op.reads(), Reads::Tokens | Reads::All);
        for &input in inputs {
            let as_it_is = takes_tokens || !input.are_tokens();
            read.push(if as_it_is {
                input.id
            } else {
                input.cast(NumberKind::SumDtypeReadRounded).id
            });
        }
        let part = op.part(&shape);
        let y = self.at(self.trace.borrow_mut().push(op, read, shape));
        part.map(|(kind, shape)| y.part(0, kind, shape));
        y
    }

    /// The same value; error messages use this name.
    pub fn named(self, name: &str) -> Var {
        let named = (self.id, name.to_string());
        self.trace.borrow_mut().names.push(named);
        self
    }

    /// Another value of its operation.
    pub(super) fn part(&self, number: usize, kind: NumberKind, shape: Vec<usize>) -> Var {
        self.push(Output(number, kind), &[self], shape)
    }

    /// A number.
    #[track_caller]
    pub(super) fn constant(&self, value: f64) -> Var {
        self.push(Constant(value), &[], vec![])
    }

    /// Keeps an error of the operation `op` on `operands`, at the caller's line, for formulas that
    /// cannot take what they get. Returns a value to go on with.
    #[track_caller]
    pub fn refuse(&self, op: &str, operands: &[&Var], expected: &str, help: &str) -> Var {
        let mut trace = self.trace.borrow_mut();
        let operands: Vec<String> = operands.iter().map(|it| trace.described(it.id)).collect();
        let got = operands.join(" and ");
        trace.keep_error(format!(
            "{op}: expected {expected}, got {got}; help: {help}"
        ));
        drop(trace);
        self.clone()
    }

    /// The number of an axis, counted from the end if it is negative.
    #[track_caller]
    pub(super) fn axis(&self, op: &str, axis: isize) -> Option<usize> {
        let rank = self.rank() as isize;
        let counted = if axis < 0 { axis + rank } else { axis };
        if counted == 0 && rank > 0 && self.has_rows() {
            let expected = format!("an axis within a row, not axis {axis}, the rows of the batch");
            let help = match op {
                "size" => "reshape and expand take the lengths of a row, without the rows",
                _ => "a formula computes each row by itself; the step averages over the rows",
            };
            self.refuse(op, &[self], &expected, help);
            return None;
        }
        if (0..rank).contains(&counted) {
            return Some(counted as usize);
        }
        let expected = format!("axis {axis} to be from {} to {}", -rank, rank - 1);
        self.refuse(
            op,
            &[self],
            &expected,
            "the first axis is the rows; -1 is the last axis",
        );
        None
    }

    /// Whether the rows of all values stay the first axis of a result with so many axes. A value
    /// without rows has fewer axes, or a length of 1 there.
    pub(super) fn rows_meet(values: &[&Var], rank: usize) -> bool {
        let meets = |it: &&Var| match (it.has_rows(), it.rank()) {
            (true, own) => own == rank,
            (false, own) => own < rank || it.shape()[0] == 1,
        };
        !values.iter().any(|it| it.has_rows()) || values.iter().all(meets)
    }

    /// Refuses values whose rows do not meet.
    #[track_caller]
    pub(super) fn refuse_rows(&self, op: &str, values: &[&Var]) -> Var {
        let expected = "values with rows to have equally many axes, and others fewer axes or a first axis of 1";
        let help = "add axes of length 1 with reshape, which takes the lengths of a row";
        self.refuse(op, values, expected, help)
    }

    /// A value of this shape, whose number of axes tensors can have.
    #[track_caller]
    pub(super) fn checked(&self, op: impl Into<Op>, inputs: &[&Var], shape: Vec<usize>) -> Var {
        let (op, count) = (op.into(), count_of(&shape));
        if shape.len() > RANK_MAX || count.is_none_or(|count| count > isize::MAX as usize / 64) {
            let expected = format!("at most {RANK_MAX} axes and less than memory could hold");
            return self.refuse(&op.name(), inputs, &expected, "check the sizes");
        }
        self.push(op, inputs, shape)
    }
}

/// How many elements a value of this shape has, if they can be counted.
pub(super) fn count_of(shape: &[usize]) -> Option<usize> {
    shape
        .iter()
        .try_fold(1usize, |count, &it| count.checked_mul(it))
}

/// The shape of both broadcast, as in NumPy: axes from the last on, of equal length or of length 1.
pub(super) fn broadcast(a: &[usize], b: &[usize]) -> Option<Vec<usize>> {
    let rank = a.len().max(b.len());
    let length = |shape: &[usize], at: usize| {
        let missing = rank - shape.len();
        if at < missing { 1 } else { shape[at - missing] }
    };
    (0..rank)
        .map(|at| match (length(a, at), length(b, at)) {
            (a, b) if a == b => Some(a),
            (1, other) | (other, 1) => Some(other),
            _ => None,
        })
        .collect()
}
