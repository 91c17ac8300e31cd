//! A run continues on any number of ranks, from any number.

use super::*;

fn comes_back_everywhere(case: &Case, writers: &[(usize, bool)], readers: &[(usize, bool)]) {
    quietly();
    for &(ranks, zero) in writers {
        let folder = Folder::new();
        let saved = together(save(
            &Case {
                zero,
                ..case.clone()
            },
            ranks,
            5,
            &folder.0,
        ));
        let opened = opened(&folder.0);
        let parts = if zero { ranks } else { 1 };
        assert_eq!(
            (opened.state.step, opened.state.world.optimizer_parts),
            (5, parts)
        );
        assert_eq!(opened.files.len(), 2 + parts);
        for &(readers, reads_zero) in readers {
            let case = Case {
                zero: reads_zero,
                ..case.clone()
            };
            let back = together(restored(&case, readers, &folder.0));
            assert!(
                back == saved,
                "{ranks} ranks, ZeRO {zero} -> {readers} ranks, ZeRO {reads_zero}"
            );
        }
    }
}

#[test]
fn adamw_comes_back_on_any_number_of_ranks_from_any_number() {
    let rule = Rule {
        weight_decay: 0.01,
        ..Rule::adamw()
    };
    comes_back_everywhere(&case(rule), &WORLDS, &WORLDS);
}

#[test]
fn sgd_comes_back_with_momentum_and_without() {
    for momentum in [0.0, 0.9] {
        comes_back_everywhere(
            &case(sgd(momentum)),
            &[(1, false), (3, true)],
            &[(1, false), (2, true), (4, true)],
        );
    }
}

#[test]
fn muon_comes_back_on_other_numbers_of_ranks() {
    comes_back_everywhere(
        &case(Rule::muon()),
        &[(1, false), (3, true)],
        &[(2, false), (4, true)],
    );
}

#[test]
fn frozen_layers_have_values_and_no_moments() {
    for frozen in ["0.", "4.bias"] {
        let case = Case {
            frozen,
            ..case(Rule::adamw())
        };
        comes_back_everywhere(&case, &[(1, false), (2, true)], &[(1, false), (3, true)]);
    }
}

#[test]
fn models_with_fewer_elements_than_ranks_come_back() {
    let case = Case {
        hidden: vec![],
        ..case(Rule::adamw())
    };
    comes_back_everywhere(&case, &[(1, false), (4, true)], &[(1, false), (3, true)]);
}
