//! Which elementwise operations and sums share a pass over memory, and what must be there before.

use super::op::{Largest, Op, Role, Sum};
use super::plan::{FusedGroup, PlanPart, Planner};

/// The most operations of a chain.
const CHAIN_MAX: usize = 26;
/// The most values that it reads from memory and writes there.
const OPERANDS_MAX: usize = 8;

impl Planner {
    /// Divides operations, which are in order, into groups and single ones.
    pub(super) fn parts(&self, order: &[usize]) -> Vec<PlanPart> {
        let (mut parts, mut open) = (Vec::new(), None::<FusedGroup>);
        for &id in order {
            if matches!(self.role(id), Role::Leaf | Role::Output) || self.into[id].is_some() {
                continue;
            }
            if let (Op::Expand(_), Some(group)) = (&self.node(id).op, &mut open)
                && group.nodes.contains(&self.node(id).inputs[0])
                && self.shape(id) == group.dims
                && group.nodes.len() < CHAIN_MAX
            {
                group.nodes.push(id);
                continue;
            }
            if self.is_on_demand(id) {
                continue;
            }
            let depends = open.as_ref().is_some_and(|group| {
                let is_in = |it: usize| group.nodes.contains(&it);
                self.reads(id)
                    .into_iter()
                    .any(|it| is_in(it) || is_in(self.base(it)))
            });
            if !self.is_fusable(id) {
                if depends {
                    parts.extend(open.take().map(PlanPart::Group));
                }
                parts.push(PlanPart::Single(id));
                continue;
            }
            if let Some(group) = &mut open {
                if self.joins(group, id) {
                    group.nodes.push(id);
                    continue;
                }
                if !depends && self.count(id) < group.dims.iter().product() {
                    parts.push(PlanPart::Group(self.group(id)));
                    continue;
                }
            }
            parts.extend(open.replace(self.group(id)).map(PlanPart::Group));
        }
        parts.extend(open.map(PlanPart::Group));
        parts
    }

    /// A group of one operation.
    fn group(&self, id: usize) -> FusedGroup {
        let node = self.node(id);
        let mut group = FusedGroup {
            nodes: vec![id],
            dims: node.shape.clone(),
            axes: vec![],
        };
        if let Op::Sum(Sum(axes)) | Op::Largest(Largest(axes)) = &node.op {
            group.dims = self.shape(node.inputs[0]).to_vec();
            group.axes.clone_from(axes);
        }
        group
    }

    /// Whether an operation can join a group; sets the group's axes if so.
    fn joins(&self, group: &mut FusedGroup, id: usize) -> bool {
        let node = self.node(id);
        // What it reads from the group must be the value itself, not a view of it.
        let is_direct =
            |&it: &usize| group.nodes.contains(&it) || !group.nodes.contains(&self.base(it));
        if group.nodes.len() >= CHAIN_MAX || !node.inputs.iter().all(is_direct) {
            return false;
        }
        let mut reads: Vec<usize> = group
            .nodes
            .iter()
            .chain([&id])
            .flat_map(|&it| self.node(it).inputs.clone())
            .collect();
        reads.retain(|it| {
            !group.nodes.contains(it) && !matches!(self.node(*it).op, Op::Constant(_))
        });
        reads.sort_unstable();
        reads.dedup();
        let sums = group
            .nodes
            .iter()
            .chain([&id])
            .filter(|it| self.role(**it) == Role::Reduction)
            .count();
        if reads.len() + sums + 1 > OPERANDS_MAX {
            return false;
        }
        let of_row = |axes: &[usize]| -> Vec<usize> {
            let each = group.dims.iter().enumerate();
            each.map(|(at, &length)| if axes.contains(&at) { 1 } else { length })
                .collect()
        };
        if let Op::Sum(Sum(axes)) | Op::Largest(Largest(axes)) = &node.op {
            let input = node.inputs[0];
            let first = axes.iter().min().copied().unwrap_or(0);
            let is_last =
                (first..group.dims.len()).all(|at| axes.contains(&at) || group.dims[at] == 1);
            let fits = self.shape(input) == group.dims
                && (group.axes == *axes || group.axes.is_empty() && is_last);
            if fits {
                group.axes = axes.clone();
            }
            return fits;
        }
        node.shape == group.dims || !group.axes.is_empty() && node.shape == of_row(&group.axes)
    }

    /// The value must be in memory.
    pub(super) fn demand(&mut self, id: usize) {
        if std::mem::replace(&mut self.stored[id], true) {
            return;
        }
        if self.role(id) == Role::View {
            self.demand_read(self.node(id).inputs[0]);
        } else if self.is_on_demand(id) {
            self.demand(self.node(id).inputs[0]);
        }
    }

    /// A chain must be able to read the value.
    fn demand_read(&mut self, id: usize) {
        if self.role(id) == Role::View && !self.stored[id] {
            self.demand_read(self.node(id).inputs[0]);
        } else {
            self.demand(id);
        }
    }

    pub(super) fn demand_inputs(&mut self, parts: &[PlanPart]) {
        for part in parts {
            match part {
                PlanPart::Group(group) => {
                    let inputs = group
                        .nodes
                        .iter()
                        .flat_map(|&id| self.nodes[id].inputs.clone());
                    let outside: Vec<usize> =
                        inputs.filter(|it| !group.nodes.contains(it)).collect();
                    outside.into_iter().for_each(|id| self.demand_read(id));
                }
                PlanPart::Single(id) => {
                    for input in self.reads(*id) {
                        match self.columns_of(*id) {
                            Some(x) => self.demand(x),
                            None if self.role(*id) == Role::Copy => self.demand_read(input),
                            None => self.demand(input),
                        }
                    }
                }
            }
        }
    }
}
