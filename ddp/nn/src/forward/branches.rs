//! Comparisons that would decide a branch. A formula is traced and has no values, so they are
//! refused with what to write instead.

use std::cmp::Ordering;

use super::trace::Var;

impl Var {
    #[track_caller]
    fn refuse_branch(&self, operator: &str, other: &Var, instead: &str) {
        let expected = "no branch on values, which a formula does not see";
        let help = format!("write {instead}.select(&yes, &no)");
        self.refuse(operator, &[self, other], expected, &help);
    }
}

/// Refused: see `Var::equal`.
impl PartialEq for Var {
    #[track_caller]
    fn eq(&self, other: &Var) -> bool {
        self.refuse_branch("==", other, "a.equal(&b)");
        false
    }

    #[track_caller]
    #[allow(clippy::partialeq_ne_impl)]
    fn ne(&self, other: &Var) -> bool {
        self.refuse_branch("!=", other, "a.equal(&b)");
        true
    }
}

macro_rules! refused {
    ($($method:ident $operator:literal $instead:literal;)*) => {$(
        #[track_caller]
        fn $method(&self, other: &Var) -> bool {
            self.refuse_branch($operator, other, $instead);
            false
        }
    )*};
}

/// Refused: see `Var::less` and `Var::less_equal`.
impl PartialOrd for Var {
    #[track_caller]
    fn partial_cmp(&self, other: &Var) -> Option<Ordering> {
        self.refuse_branch("partial_cmp", other, "a.less(&b)");
        None
    }

    refused! {
        lt "<" "a.less(&b)";
        le "<=" "a.less_equal(&b)";
        gt ">" "b.less(&a)";
        ge ">=" "b.less_equal(&a)";
    }
}
