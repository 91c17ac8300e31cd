use super::*;

#[test]
fn generation_becomes_a_filter_wherever_it_is_a_tag() {
    assert_eq!(
        with_marks("a{%- generation -%}{{ generation }}{% endgeneration+%}{% if x %}"),
        "a{%- filter generation -%}{{ generation }}{% endfilter+%}{% if x %}"
    );
    assert_eq!(with_marks("{{ a }} {% if"), "{{ a }} {% if");
}
