//! Cuts a module into parts: to split it over devices, or to compute parts again in backward. A
//! cut is where only one value goes on to later operations. Each device traces the whole module and
//! runs what is between two cuts, so names and random numbers are those of the whole, and in f32
//! the bits.

use std::ops::Range;

use super::kinds::kinds;
use super::op::{Input, Op, Parameter};
use super::trace::{NumberKind, Trace, Var, count_of};
use crate::build::{Declarations, ParamId};
use crate::error::{DEVICES_PER_RANK, Error, Result};

/// A place in a trace between two operations.
#[derive(Clone, Copy, Debug)]
struct Cut {
    /// What goes from below to above.
    value: usize,
    /// The first operation above.
    first: usize,
}

/// What lies between two cuts that follow each other.
#[derive(Clone, Debug)]
pub(crate) struct ModulePiece {
    /// How many parameters are read before it: in each trace of the module as many.
    reads_before: usize,
    /// The shape of a row of what goes into it.
    pub(crate) row: Vec<usize>,
    /// Which parameters and buffers it reads, in order.
    reads: Vec<ParamId>,
}

/// A part of a module: one or several pieces.
#[derive(Debug)]
pub(super) struct Part {
    /// How many parameters are read before it begins, and before it ends; None at the module's own
    /// ends.
    begin: Option<usize>,
    end: Option<usize>,
    /// By parameter of the module: its number in the part.
    ids: Vec<Option<ParamId>>,
    /// The shape of a row of the module's input.
    module_row: Vec<usize>,
    /// The shape of a row of the part's own input.
    row: Vec<usize>,
}

impl Trace {
    /// For each value: the first and the last operation that reads it to compute `y`.
    fn reads(&self, y: usize) -> Vec<Option<[usize; 2]>> {
        let mut reads: Vec<Option<[usize; 2]>> = vec![None; self.nodes.len()];
        for id in (0..=y).rev() {
            if reads[id].is_none() && id != y {
                continue;
            }
            for &input in &self.nodes[id].inputs {
                let last = reads[input].map_or(id, |[_, last]| last);
                reads[input] = Some([id, last]);
            }
        }
        reads
    }

    fn is_parameter(&self, id: usize) -> bool {
        matches!(self.nodes[id].op, Op::Parameter(_))
    }

    /// By number of parameters read before: the last cut with the smallest value that has rows.
    fn cuts(&self, y: usize) -> Vec<Option<Cut>> {
        let (reads, kinds) = (self.reads(y), kinds(&self.nodes));
        let is_read_after = |value: usize, id: usize| reads[value].is_some_and(|it| it[1] > id);
        let mut cuts: Vec<Option<Cut>> = vec![None];
        // Of a row: a batch may have none.
        let count = |value: usize| count_of(&self.nodes[value].shape[1..]);
        // What was made before and is read later. What depends on neither input nor parameters is
        // made by each part.
        let mut open: Vec<usize> = Vec::new();
        let mut depends = vec![false; self.nodes.len()];
        for (id, node) in self.nodes.iter().enumerate().take(y + 1) {
            let is_leaf = matches!(node.op, Op::Input(_) | Op::Parameter(_));
            depends[id] = is_leaf || node.inputs.iter().any(|&it| depends[it]);
            if reads[id].is_none() && id != y || self.is_parameter(id) {
                continue;
            }
            // A value of another kind would be rounded in bf16.
            if let (&[value], Some(last)) = (&open[..], cuts.last_mut())
                && kinds[value] == NumberKind::LayerDtype
                && self.nodes[value].has_rows
                && last.is_none_or(|last| count(value) <= count(last.value))
            {
                *last = Some(Cut { value, first: id });
            }
            let parameters = node.inputs.iter().filter(|&&it| self.is_parameter(it));
            let first = parameters.filter(|&&it| reads[it].is_some_and(|it| it[0] == id));
            cuts.extend(first.map(|_| None));
            open.retain(|&value| is_read_after(value, id));
            for &input in &node.inputs {
                if self.is_parameter(input) && is_read_after(input, id) && !open.contains(&input) {
                    open.push(input);
                }
            }
            if depends[id] && is_read_after(id, id) {
                open.push(id);
            }
        }
        // Nothing above the last one has parameters.
        cuts.pop();
        cuts
    }

    /// Where each parameter is on the way to `y`: at the first operation that reads it.
    fn parameters(&self, y: usize) -> Vec<(usize, ParamId, usize)> {
        let reads = self.reads(y);
        let mut all = Vec::new();
        for (id, node) in self.nodes.iter().enumerate() {
            if let Op::Parameter(Parameter(parameter)) = node.op {
                all.push((reads[id].map_or(id, |it| it[0]), parameter, id));
            }
        }
        all
    }

    /// The first operations of the parts of the way to `y`: all but the first follow a cut.
    pub(super) fn firsts(&self, y: usize) -> Vec<usize> {
        let cuts = self.cuts(y).into_iter().skip(1).flatten();
        [0].into_iter().chain(cuts.map(|cut| cut.first)).collect()
    }

    /// Backward computes the first `count` parts of the way to `y` again.
    pub(super) fn recompute(&mut self, y: usize, count: usize) {
        let firsts = self.firsts(y);
        let end = firsts.get(count).copied().unwrap_or(y + 1);
        for (id, node) in self.nodes[..end].iter_mut().enumerate() {
            let part = firsts.partition_point(|&first| first <= id) - 1;
            // An operation by hand may have effects.
            if !matches!(node.op, Op::Custom(_)) {
                node.again.get_or_insert(firsts[part]);
            }
        }
    }

    /// The pieces of the way to `y`. `may_begin`: whether to cut below this piece.
    pub(super) fn pieces(
        &self,
        y: usize,
        may_begin: &dyn Fn(&ModulePiece) -> bool,
    ) -> Vec<ModulePiece> {
        let piece = |reads_before: usize, value: usize| ModulePiece {
            reads_before,
            row: self.nodes[value].shape[1..].to_vec(),
            reads: Vec::new(),
        };
        let (mut pieces, mut firsts) = (vec![piece(0, 0)], vec![0]);
        for (reads_before, cut) in self.cuts(y).into_iter().enumerate().skip(1) {
            let found = cut.map(|cut| (piece(reads_before, cut.value), cut.first));
            if let Some((piece, first)) = found.filter(|(piece, _)| may_begin(piece)) {
                pieces.push(piece);
                firsts.push(first);
            }
        }
        for (place, parameter, _) in self.parameters(y) {
            let at = firsts.partition_point(|&first| first <= place) - 1;
            pieces[at].reads.push(parameter);
        }
        pieces
    }
}

impl ModulePiece {
    /// Whether both begin after as many parameters.
    pub(super) fn is_same_cut(&self, other: &ModulePiece) -> bool {
        self.reads_before == other.reads_before
    }

    /// The elements of its parameters.
    pub(crate) fn elements(&self, declarations: &Declarations) -> usize {
        let mut reads = self.reads.clone();
        reads.sort_unstable();
        reads.dedup();
        let declared = reads.iter().map(|id| &declarations.list[id.0]);
        let trained = declared.filter(|declared| !declared.is_buffer);
        trained
            .map(|declared| declared.shape.iter().product::<usize>())
            .sum()
    }
}

impl Part {
    /// The part of `pieces` from one number to another, of rows of this shape, and what it
    /// declares.
    pub(super) fn new(
        pieces: &[ModulePiece],
        range: Range<usize>,
        row: &[usize],
        of: &Declarations,
    ) -> (Part, Declarations) {
        let below = pieces[..range.start].iter().flat_map(|piece| &piece.reads);
        let below: Vec<ParamId> = below.copied().collect();
        let reads = pieces[range.clone()].iter().flat_map(|piece| &piece.reads);
        let reads: Vec<ParamId> = reads.copied().collect();
        let (declarations, ids) = of.part(&reads, &below);
        let before = |at: usize| pieces.get(at).map(|piece| piece.reads_before);
        let part = Part {
            begin: before(range.start).filter(|_| range.start > 0),
            end: before(range.end),
            ids,
            module_row: row.to_vec(),
            row: pieces[range.start].row.clone(),
        };
        (part, declarations)
    }

    /// Whether it takes the module's own input.
    pub(super) fn is_first(&self) -> bool {
        self.begin.is_none()
    }

    /// The shape of the module's input for an input of this shape to this part. Only rows of tokens
    /// may be shorter.
    pub(super) fn module_shape(&self, shape: &[usize], takes_tokens: bool) -> Vec<usize> {
        let (batch, row) = shape.split_at(shape.len().min(1));
        let mut module_shape = [batch, &self.module_row[..]].concat();
        if let ([_, time], Some(&shorter)) = (&mut module_shape[..], row.first())
            && takes_tokens
            && row != self.row
        {
            *time = shorter;
        }
        module_shape
    }

    /// Leaves this part of a trace from `x` to `y`: its own input and output.
    pub(super) fn of(&self, [x, y]: [&Var; 2], shape: &[usize]) -> Result<[Var; 2]> {
        let mut trace = x.trace.borrow_mut();
        let cuts = trace.cuts(y.id);
        let other = || {
            Error::Usage(format!(
                "a model over several devices: expected a forward that reads the same \
                 parameters in the same order in training and evaluation, got another order; help: \
                 leave out {DEVICES_PER_RANK}, or read them alike in both"
            ))
        };
        let cut = |reads_before: usize| cuts.get(reads_before).copied().flatten().ok_or_else(other);
        let from = self.begin.map(cut).transpose()?;
        let to = self.end.map(cut).transpose()?;
        let own = from.map_or(0, |it| it.first)..to.map_or(trace.nodes.len(), |it| it.first);
        for (place, parameter, id) in trace.parameters(y.id) {
            let known = self.ids[parameter.0].filter(|_| own.contains(&place));
            // One that nothing reads is at its own place.
            if own.contains(&place) && known.is_none() && place != id {
                return Err(other());
            }
            trace.nodes[id].op = known.map_or(Input.into(), |it| Parameter(it).into());
        }
        let [input, output] = [
            from.map_or(x.id, |it| it.value),
            to.map_or(y.id, |it| it.value),
        ];
        let node = &mut trace.nodes[input];
        (node.op, node.again) = (Input.into(), None);
        node.inputs.clear();
        if node.shape[..] != *shape {
            let (expected, got) = (
                format!("an input of {:?}", node.shape),
                format!("{shape:?}"),
            );
            let help = "give it the output of the part below";
            return Err(Error::model("a part of a model", expected, got, help));
        }
        drop(trace);
        Ok([x.at(input), x.at(output)])
    }
}
