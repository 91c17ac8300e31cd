//! Machine code of light steps on x86-64 processors with AVX2: one loop over a block that keeps
//! values in registers, eight elements at a time.
//!
//! It is made for runs of steps that are a few instructions each, and has the bits of `cpu.rs`
//! (except NaN's). There each step reads and writes the first cache, which takes longer than these
//! functions: eight of them, forward and backward over 4096 × 1024 elements, take 16 ms on a core
//! of a Zen 4 as a loop each, and 2.8 as one.

use std::ops::Range;

use super::loops::{Loop, LoopOperand, Loops, OPERANDS_MAX, WIDTH};
use super::steps::{Chain, ChainStep, Function, OperandsInOrder, STEPS_MAX};
use crate::ops::Activation::Relu;

const BYTES: u8 = 4 * WIDTH as u8;

/// Numbers that loops read besides those of steps.
pub(super) const NUMBERS: [f64; 3] = [1.0, -1.0, -0.0];
const ONE: usize = STEPS_MAX;
const MINUS_ONE: usize = STEPS_MAX + 1;
const MINUS_ZERO: usize = STEPS_MAX + 2;
/// The numbers of all steps, and `NUMBERS`, each in all elements of a register.
pub(super) type StepNumbers<T> = [[T; WIDTH]; STEPS_MAX + NUMBERS.len()];

/// Makes the loops of a chain.
pub(super) fn compile(chain: &Chain, in_order: &OperandsInOrder) -> Loops {
    let (mut loops, mut code, mut at) = (Vec::new(), Vec::new(), 0);
    while at < chain.steps.len() {
        let end = (at..chain.steps.len()).find(|&step| !belongs(chain, step, in_order));
        let steps = at..end.unwrap_or(chain.steps.len());
        at = steps.end + 1;
        // One step alone is as fast without.
        let is_work = |it: &usize| !chain.is_row_wide[*it] && !chain.steps[*it].is_load();
        if steps.clone().filter(is_work).count() > 1
            && let Some(made) = Assembler::new(chain, in_order, steps.clone()).assemble()
        {
            let (start, (body, operands)) = (code.len(), made);
            code.extend(body);
            loops.push(Loop {
                steps,
                operands,
                start,
            });
        }
    }
    Loops::new(loops, code)
}

/// Whether a loop may have the step within it.
fn belongs(chain: &Chain, step: usize, in_order: &OperandsInOrder) -> bool {
    use Function::*;
    match chain.steps[step] {
        ChainStep::Sum(_) | ChainStep::Max(_) => false,
        _ if chain.is_row_wide[step] => true,
        ChainStep::Load(load) => in_order[load],
        // A row that is longer than a block is computed once for each sum, and stored at the end.
        ChainStep::Store(store, value) => {
            let reduces = |it: &ChainStep| matches!(it, ChainStep::Sum(_) | ChainStep::Max(_));
            let is_last = !chain.steps[step..].iter().any(reduces);
            is_last && !chain.is_row_wide[value] && in_order[chain.loads.len() + store]
        }
        ChainStep::Apply(function, _) => matches!(
            function,
            Add | Sub
                | Mul
                | Div
                | Min
                | Max
                | Less
                | LessEqual
                | Equal
                | Where
                | Neg
                | Abs
                | Sqrt
                | Rsqrt
                | Activation(Relu)
                | Gradient(Relu)
        ),
        ChainStep::Constant(_) => true,
    }
}

/// Registers for values; two more are for use within a step.
const REGISTERS: usize = 14;
const FIRST: u8 = 14;
const SECOND: u8 = 15;
/// General registers: rax counts bytes, rdx points to the numbers, rdi to the table of operands.
const NUMBERS_AT: u8 = 2;
const TABLE: u8 = 7;
/// Point to the elements of operands. That of the table is loaded last.
const OPERANDS: [u8; OPERANDS_MAX] = [6, 8, 9, 10, 11, 3, 5, 12, 13, 14, 15, TABLE];
/// Those of them that belong to the caller.
const SAVED: [u8; 6] = [3, 5, 12, 13, 14, 15];

/// What an instruction reads last.
#[derive(Clone, Copy)]
enum LastOperand {
    Register(u8),
    /// Of the operand that this general register points to.
    Elements(u8),
    Number(usize),
}

/// Instructions on eight f32.
const LOAD: u8 = 0x10;
const STORE: u8 = 0x11;
const SQRT: u8 = 0x51;
const AND: u8 = 0x54;
/// Of the first one's complement.
const AND_NOT: u8 = 0x55;
const OR: u8 = 0x56;
const XOR: u8 = 0x57;
const ADD: u8 = 0x58;
const MUL: u8 = 0x59;
const SUB: u8 = 0x5c;
const MIN: u8 = 0x5d;
const DIV: u8 = 0x5e;
const MAX: u8 = 0x5f;
const COMPARE: u8 = 0xc2;
/// What `COMPARE` asks, without exceptions.
const EQUAL: u8 = 0x00;
const UNORDERED: u8 = 0x03;
const UNEQUAL: u8 = 0x04;
const LESS: u8 = 0x11;
const LESS_EQUAL: u8 = 0x12;
const GREATER_EQUAL: u8 = 0x1d;

struct Assembler<'a> {
    chain: &'a Chain,
    in_order: &'a OperandsInOrder,
    steps: Range<usize>,
    code: Vec<u8>,
    operands: Vec<LoopOperand>,
    /// By register: the value in it.
    held: [Option<usize>; REGISTERS],
}

impl<'a> Assembler<'a> {
    fn new(chain: &'a Chain, in_order: &'a OperandsInOrder, steps: Range<usize>) -> Assembler<'a> {
        Assembler {
            chain,
            in_order,
            steps,
            code: Vec::new(),
            operands: Vec::new(),
            held: [None; REGISTERS],
        }
    }

    /// The loop as a function, and its operands; None if it needs too many of them or of registers.
    fn assemble(mut self) -> Option<(Vec<u8>, Vec<LoopOperand>)> {
        for step in self.steps.clone().filter(|it| !self.chain.is_row_wide[*it]) {
            match self.chain.steps[step] {
                ChainStep::Apply(function, values) => self.apply(step, function, values)?,
                ChainStep::Store(store, value) => {
                    self.store(value, step, LoopOperand::Store(store))?
                }
                _ => {}
            }
        }
        let body = std::mem::take(&mut self.code);
        SAVED.into_iter().for_each(|it| self.push_or_pop(0x50, it));
        for (at, &to) in OPERANDS.iter().enumerate().take(self.operands.len()) {
            // mov to, [TABLE + 8 * at]
            let [high, low] = [to >> 3, to & 7];
            let place = 8 * at as u8;
            self.code
                .extend([0x48 | high << 2, 0x8b, 0x40 | low << 3 | TABLE, place]);
        }
        // xor eax, eax
        self.code.extend([0x31, 0xc0]);
        self.code.extend(&body);
        // add rax, BYTES; cmp rax, rcx; jb to the start of the body
        self.code
            .extend([0x48, 0x83, 0xc0, BYTES, 0x48, 0x39, 0xc8, 0x0f, 0x82]);
        self.code.extend((-(body.len() as i32 + 13)).to_le_bytes());
        // vzeroupper
        self.code.extend([0xc5, 0xf8, 0x77]);
        SAVED
            .into_iter()
            .rev()
            .for_each(|it| self.push_or_pop(0x58, it));
        // ret
        self.code.push(0xc3);
        Some((self.code, self.operands))
    }

    fn push_or_pop(&mut self, opcode: u8, register: u8) {
        self.code.extend((register >= 8).then_some(0x41));
        self.code.push(opcode | register & 7);
    }

    fn apply(&mut self, step: usize, function: Function, values: [usize; 3]) -> Option<()> {
        use Function::*;
        use LastOperand::{Number, Register};
        let [a, b, c] = values;
        let arguments = &values[..function.arguments()];
        let x = self.register(if function == Where { c } else { a }, step, arguments)?;
        let y = if arguments.len() > 1 { b } else { a };
        let y = self.source(y, step, arguments)?;
        let condition = self.source(a, step, arguments)?;
        let to = self.result(step, arguments)?;
        match function {
            Add => self.instruction(ADD, to, x, y),
            Sub => self.instruction(SUB, to, x, y),
            Mul => self.instruction(MUL, to, x, y),
            Div => self.instruction(DIV, to, x, y),
            Less | LessEqual | Equal => {
                let what = match function {
                    Less => LESS,
                    LessEqual => LESS_EQUAL,
                    _ => EQUAL,
                };
                self.compare(what, FIRST, x, y);
                self.instruction(AND, to, FIRST, Number(ONE));
            }
            Min | Max => {
                // They give y if x is NaN.
                let opcode = if function == Min { MIN } else { MAX };
                self.instruction(opcode, SECOND, x, y);
                self.compare(UNORDERED, FIRST, x, Register(x));
                self.choose(to, Register(x), SECOND);
            }
            Where => {
                self.instruction(XOR, FIRST, FIRST, Register(FIRST));
                self.compare(UNEQUAL, FIRST, FIRST, condition);
                self.choose(to, y, x);
            }
            Neg => self.instruction(MUL, to, x, Number(MINUS_ONE)),
            Abs => {
                self.instruction(LOAD, FIRST, 0, Number(MINUS_ZERO));
                self.instruction(AND_NOT, to, FIRST, Register(x));
            }
            Sqrt => self.instruction(SQRT, to, 0, Register(x)),
            Rsqrt => {
                self.instruction(SQRT, FIRST, 0, Register(x));
                self.instruction(LOAD, SECOND, 0, Number(ONE));
                self.instruction(DIV, to, SECOND, Register(FIRST));
            }
            Activation(Relu) => {
                // Gives x if it is NaN or −0.
                self.instruction(XOR, FIRST, FIRST, Register(FIRST));
                self.instruction(MAX, to, FIRST, Register(x));
            }
            Gradient(Relu) => {
                self.instruction(XOR, SECOND, SECOND, Register(SECOND));
                self.compare(GREATER_EQUAL, FIRST, SECOND, y);
                self.instruction(AND_NOT, to, FIRST, Register(x));
            }
            _ => return None,
        }
        if self.is_read_in(step, self.steps.end..self.chain.steps.len()) {
            self.store(step, step, LoopOperand::Slot(self.chain.slots[step]))?;
        }
        Some(())
    }

    /// `yes` where `FIRST` has ones, else `no`, which may be `SECOND`.
    fn choose(&mut self, to: u8, yes: LastOperand, no: u8) {
        self.instruction(AND_NOT, SECOND, FIRST, LastOperand::Register(no));
        self.instruction(AND, FIRST, FIRST, yes);
        self.instruction(OR, to, FIRST, LastOperand::Register(SECOND));
    }

    fn compare(&mut self, what: u8, to: u8, x: u8, y: LastOperand) {
        self.instruction(COMPARE, to, x, y);
        self.code.push(what);
    }

    fn store(&mut self, value: usize, step: usize, to: LoopOperand) -> Option<()> {
        let from = self.register(value, step, &[])?;
        let to = LastOperand::Elements(self.operand(to)?);
        self.instruction(STORE, from, 0, to);
        Some(())
    }

    fn is_read_in(&self, value: usize, mut steps: Range<usize>) -> bool {
        steps.any(|step| self.chain.steps[step].values().contains(&value))
    }

    /// The first step of the loop from `step` on that reads the value.
    fn next(&self, value: usize, step: usize) -> Option<usize> {
        (step..self.steps.end).find(|&it| self.is_read_in(value, it..it + 1))
    }

    /// A register for the result of `step`: also one of an argument that nothing reads later.
    fn result(&mut self, step: usize, arguments: &[usize]) -> Option<u8> {
        for register in 0..REGISTERS {
            if self.held[register].is_some_and(|it| self.next(it, step + 1).is_none()) {
                self.held[register] = None;
            }
        }
        let register = self.free(step, arguments)?;
        self.held[usize::from(register)] = Some(step);
        Some(register)
    }

    /// A register that holds nothing, or else the value that is read last of those that are in
    /// memory, too. Those of `keeps` stay.
    fn free(&self, step: usize, keeps: &[usize]) -> Option<u8> {
        let last = |register: usize| match self.held[register] {
            None => Some(usize::MAX),
            Some(value) => {
                let goes = self.is_in_memory(value) && !keeps.contains(&value);
                goes.then(|| self.next(value, step).unwrap_or(usize::MAX - 1))
            }
        };
        let register = (0..REGISTERS).max_by_key(|&it| last(it))?;
        last(register).map(|_| register as u8)
    }

    fn is_in_memory(&self, value: usize) -> bool {
        let is_made_here = self.steps.contains(&value) && !self.chain.steps[value].is_load();
        let is_written = self.is_read_in(value, self.steps.end..self.chain.steps.len());
        self.chain.is_row_wide[value] || !is_made_here || is_written
    }

    /// A register that has the value.
    fn register(&mut self, value: usize, step: usize, keeps: &[usize]) -> Option<u8> {
        if let Some(register) = self.held.iter().position(|it| *it == Some(value)) {
            return Some(register as u8);
        }
        let from = self.memory(value)?;
        let register = self.free(step, keeps)?;
        self.held[usize::from(register)] = Some(value);
        self.instruction(LOAD, register, 0, from);
        Some(register)
    }

    /// Where an instruction reads the value: in a register, if it is read again.
    fn source(&mut self, value: usize, step: usize, keeps: &[usize]) -> Option<LastOperand> {
        let is_read_again = self.next(value, step + 1).is_some();
        if self.held.contains(&Some(value)) || is_read_again && !self.chain.is_row_wide[value] {
            return Some(LastOperand::Register(self.register(value, step, keeps)?));
        }
        self.memory(value)
    }

    /// Where a value that no register has is.
    fn memory(&mut self, value: usize) -> Option<LastOperand> {
        if self.chain.is_row_wide[value] {
            return Some(LastOperand::Number(value));
        }
        let operand = match self.chain.steps[value] {
            ChainStep::Load(load) if self.in_order[load] => LoopOperand::Load(load),
            _ => LoopOperand::Slot(self.chain.slots[value]),
        };
        Some(LastOperand::Elements(self.operand(operand)?))
    }

    /// The general register that points to the elements of an operand.
    fn operand(&mut self, operand: LoopOperand) -> Option<u8> {
        let known = self.operands.iter().position(|it| *it == operand);
        let at = known.unwrap_or(self.operands.len());
        if known.is_none() {
            self.operands.push(operand);
        }
        OPERANDS.get(at).copied()
    }

    /// In the three-byte VEX form, for 256 bits. `first` is 0 where there is one source.
    fn instruction(&mut self, opcode: u8, to: u8, first: u8, second: LastOperand) {
        let base = match second {
            LastOperand::Register(register) | LastOperand::Elements(register) => register,
            LastOperand::Number(_) => NUMBERS_AT,
        };
        let high = u8::from(to < 8) << 7 | u8::from(base < 8) << 5;
        let [to, low] = [(to & 7) << 3, base & 7];
        self.code
            .extend([0xc4, high | 0x41, (!first & 15) << 3 | 4, opcode]);
        match second {
            LastOperand::Register(_) => self.code.push(0xc0 | to | low),
            // [base + rax]
            LastOperand::Elements(_) => self.code.extend([0x44 | to, low, 0]),
            LastOperand::Number(number) => {
                self.code.push(0x80 | to | low);
                let offset = number * usize::from(BYTES);
                self.code.extend((offset as i32).to_le_bytes());
            }
        }
    }
}
